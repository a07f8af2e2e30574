"""ZeRO stages 0-3 without an engine: `dsx_zero` under the name that scripts use.

The names of this module are the same objects as in the package, which it imports. The exception is `Init`, which makes
its store on disk itself here, because `dsx_zero` does not import dsx-nvme.
"""

from dsx_zero import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_zero import __all__ as __all__

from .swap_space import Init as Init

MiCS_Init = Init
