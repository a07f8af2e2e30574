"""`python -m dsx_nvme`: the command `dsx-nvme`; without arguments, what runs here and why."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["explain"]))
