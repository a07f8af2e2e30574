"""Process groups and collectives: `dsx_comm` under the name that scripts use.

This module defines nothing: its names are the same objects as in the package, which it imports.
"""

from dsx_comm import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_comm import __all__ as __all__
