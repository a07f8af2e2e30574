"""The autotuner: `dsx_plan.autotuning` under the name that scripts use.

This module defines nothing: its names are the same objects as in the package, which it imports.
"""

from dsx_plan.autotuning import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_plan.autotuning import __all__ as __all__
