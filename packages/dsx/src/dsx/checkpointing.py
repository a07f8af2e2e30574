"""Activation checkpointing: `dsx_activations` under the name that scripts use.

This module defines nothing: its names are the same objects as in the package, which it imports.
"""

from dsx_activations import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_activations import __all__ as __all__
