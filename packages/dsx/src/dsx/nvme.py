"""Tensors to and from disk: `dsx_nvme` under the name that scripts use.

This module defines nothing: its names are the same objects as in the package, which it imports.
"""

from dsx_nvme import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_nvme import __all__ as __all__
