"""The launcher: `dsx_launch` under the name that scripts use, also as `python -m dsx.launcher`."""

import sys

from dsx_launch import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from dsx_launch import __all__ as __all__

if __name__ == "__main__":
    from dsx_launch.main import main

    sys.exit(main(prog="python -m dsx.launcher"))
