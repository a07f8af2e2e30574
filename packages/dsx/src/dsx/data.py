"""Data loading, curricula, random-LTD and layer dropping: `dsx_data` under the name scripts know.

There is one identity of every class and function: this module only passes names on, and only when it is imported.
"""

from dsx_data import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_data import __all__ as __all__
