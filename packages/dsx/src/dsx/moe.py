"""Mixture of experts: `dsx_moe` under the name scripts know.

There is one identity of every class and function: this module only passes names on, and only when it is imported.
"""

from dsx_moe import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_moe import __all__ as __all__
