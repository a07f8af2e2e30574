"""Optimizers and kernels: `dsx_ops` under the name that scripts use.

This module defines nothing: its names are the same objects as in the package, which it imports.
"""

from dsx_ops import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_ops import __all__ as __all__
