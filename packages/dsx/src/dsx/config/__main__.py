"""``python -m dsx.config``; see ``cli``."""

import sys

from dsx_core import end_with_reader

from .cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(end_with_reader(main))
