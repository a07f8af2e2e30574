"""``dsx nvme``: the command of dsx-nvme, with an error message if that package is missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .errors import in_checkout


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dsx-nvme`` with these words; returns its exit code."""
    try:
        from dsx_nvme.cli import main as run
    except ModuleNotFoundError as error:
        if error.name != "dsx_nvme":
            raise
        sys.stderr.write(f"dsx nvme: needs dsx-nvme, which is not installed; {in_checkout('dsx-nvme')}\n")
        return 2
    return run(argv)
