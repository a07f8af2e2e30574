"""ZeRO stages 0-3 without an engine: `dsx_zero` under the name scripts know.

There is one identity of every class and function: this module only passes names on, and only when it is imported. The
exception is `Init`, which makes its store on disk itself here: `dsx_zero` imports no dsx-nvme.
"""

from dsx_zero import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_zero import __all__ as __all__

from .swap_space import Init as Init

MiCS_Init = Init
