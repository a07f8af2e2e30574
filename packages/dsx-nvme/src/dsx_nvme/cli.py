"""`dsx-nvme`: tune, measure and explain tensor I/O to disk. Each command is loaded only when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from dsx_core import CommandParser, run_program

from ._version import __version__

COMMANDS = {
    "tune": (".tune.tuner", "find the fastest section `aio` for a folder"),
    "bench": (".tune.bench", "measure reads and writes of one setting"),
    "explain": (".report", "report which engines run here, and why"),
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
    """Run a command; returns its exit code. An unknown command ends the program with 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = CommandParser(prog=prog, version=f"dsx-nvme {__version__}", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    if not words or words[0] not in COMMANDS:
        parser.parse_args(words)  # prints the help, the version or an error, and ends the program
    command = importlib.import_module(COMMANDS[words[0]][0], __package__)
    return run_program(lambda: command.main(words[1:], prog=f"{prog} {words[0]}"))
