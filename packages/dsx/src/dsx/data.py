"""Data loading, curricula, random-LTD and layer dropping: `dsx_data` under the name that scripts use.

This module defines nothing: its names are the same objects as in the package, which it imports.
"""

from dsx_data import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_data import __all__ as __all__
