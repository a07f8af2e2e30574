"""Pipeline parallelism and tensor slicing: `dsx_pipe` under the name scripts know.

There is one identity of every class and function: this module only passes names on, and only when it is imported.
"""

from dsx_pipe import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_pipe import __all__ as __all__
from dsx_pipe.tensor import tp_model_init as tp_model_init
