"""Pipeline parallelism and tensor slicing: `dsx_pipe` under the name that scripts use.

This module defines nothing: its names are the same objects as in the package, which it imports.
"""

from typing import TYPE_CHECKING

from dsx_pipe import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_pipe import __all__ as __all__
from dsx_pipe.tensor import tp_model_init as tp_model_init

from .deepspeed_names import finder

if not TYPE_CHECKING:  # otherwise a type checker would accept every misspelt name
    __getattr__ = finder(__name__)
