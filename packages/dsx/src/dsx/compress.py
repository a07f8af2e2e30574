"""Quantisation, pruning, layer reduction and distillation: `dsx_compress` under the name that scripts use.

This module defines nothing: its names are the same objects as in the package, which it imports.
"""

from dsx_compress import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_compress import __all__ as __all__
