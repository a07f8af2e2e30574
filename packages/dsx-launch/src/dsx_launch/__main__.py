"""``python -m dsx_launch`` is ``dsx-launch``."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m dsx_launch"))
