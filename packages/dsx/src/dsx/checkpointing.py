"""Activation checkpointing: `dsx_zero.checkpointing` under the name scripts know.

There is one identity of every class and function: this module only passes names on, and only when it is imported.
"""

from dsx_zero.checkpointing import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_zero.checkpointing import __all__ as __all__
