"""``dsx bench``: measure a part of the system on this machine; `dsx bench comm` times the collectives."""

from __future__ import annotations

from collections.abc import Sequence

from ._version import __version__
from .commands import Subcommand, run_command

COMMANDS = {"comm": Subcommand("comm", "dsx_comm.benchmark:main")}


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx bench") -> int:
    """Run a benchmark; returns its exit code, or 2 for an unknown name."""
    return run_command(COMMANDS, argv, prog=prog, version=f"dsx {__version__}")
