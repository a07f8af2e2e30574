"""Optimizers and kernels: `dsx_ops` under the name that scripts use.

This module defines nothing: its names are the same objects as in the package, which it imports.
"""

from typing import TYPE_CHECKING

from dsx_ops import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_ops import __all__ as __all__

from .deepspeed_names import finder

if not TYPE_CHECKING:  # otherwise a type checker would accept every misspelt name
    __getattr__ = finder(__name__)
