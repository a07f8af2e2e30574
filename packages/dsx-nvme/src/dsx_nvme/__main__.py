"""`python -m dsx_nvme`: the command `dsx-nvme`. Without arguments it reports which engines run here, and why."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["explain"]))
