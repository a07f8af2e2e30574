"""`dsx-nvme`: tune, measure and explain tensor I/O to disk. Each command is loaded only when it is called."""

from __future__ import annotations

from collections.abc import Sequence

from dsx_core.commands import Subcommand, run_command

from ._version import __version__

COMMANDS = {
    "tune": Subcommand("tune", "dsx_nvme.tune.tuner:main"),
    "bench": Subcommand("bench", "dsx_nvme.tune.bench:main"),
    "explain": Subcommand("explain", "dsx_nvme.report:main"),
}


def ds_nvme_tune() -> int:
    """The program `ds_nvme_tune`: `dsx-nvme tune` under the name that DeepNVMe's documents use."""
    from .tune.tuner import main as run  # lazy import, as all commands

    return run(prog="ds_nvme_tune")


def ds_io() -> int:
    """The program `ds_io`: `dsx-nvme bench` under the name that DeepNVMe's documents use."""
    from .tune.bench import main as run  # lazy import, as all commands

    return run(prog="ds_io")


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx-nvme") -> int:
    """Run a command; returns its exit code, 2 for an unknown command."""
    return run_command(COMMANDS, argv, prog=prog, version=f"dsx-nvme {__version__}")
