"""The ``dsx`` command. Each subcommand is imported only when it is called, so that ``dsx --help`` is fast.

A subcommand is an entry in `COMMANDS`: a module with a function ``main(argv) -> exit code``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dsx_core import end_with_reader, nearest

from ._version import __version__
from .errors import in_checkout


@dataclass(frozen=True)
class Subcommand:
    """A subcommand: its module, a line of help, and the package whose command it is where that is not dsx."""

    module: str
    summary: str
    package: str = ""


COMMANDS = {
    "launch": Subcommand("dsx_launch.main", "start a program on every device of one or many machines"),
    "doctor": Subcommand("dsx.doctor", "report what this machine and installation offer, and what is missing"),
    "explain": Subcommand("dsx.explain_command", "say what the code of an error or a warning means, and what to do"),
    "ssh": Subcommand("dsx_launch.remote_shell", "run one command on every host of a hostfile"),
    "config": Subcommand("dsx.config.__main__", "explain a configuration, print its schema or reference"),
    "bench": Subcommand("dsx.bench_command", "time the collectives on this machine: dsx bench comm"),
    "nvme": Subcommand("dsx_nvme.cli", "tune and measure tensor I/O to disk", "dsx-nvme"),
    "pipe": Subcommand("dsx_pipe.cli", "show, draw and choose pipeline schedules", "dsx-pipe"),
    "data": Subcommand("dsx_data.cli", "analyse datasets for curricula and token budgets", "dsx-data"),
    "compress": Subcommand("dsx_compress.__main__", "show what a file of compressed weights holds", "dsx-compress"),
    "checkpoint": Subcommand("dsx_checkpoint.command", "inspect, verify, compare, import and export checkpoints"),
    "elastic": Subcommand("dsx.elasticity.command", "batch sizes for a number of devices that changes"),
    "autotune": Subcommand("dsx_plan.autotuning.command", "search for a good configuration: launch --autotuning tune"),
    "plan": Subcommand("dsx_plan.command", "memory, messages and time of a job before it runs"),
    "report": Subcommand("dsx.cli_report", "write the HTML report of a training run"),
}


def usage() -> str:
    """The text of ``dsx --help``."""
    width = max(map(len, COMMANDS))
    lines = ["usage: dsx <command> [options]", "commands:"]
    lines += [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "dsx <command> --help tells more; dsx --version prints the version", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns its exit code, 2 for an unknown name, or 141 if the reader of the output has ended."""
    return end_with_reader(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0 if words else 2
    name, rest = words[0], words[1:]
    if name in ("-V", "--version"):
        sys.stdout.write(f"dsx {__version__}\n")
        return 0
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        meant = f"launch {name}" if name.startswith("-") else near[0] if near else ""
        hint = f"; did you mean 'dsx {meant}'?" if meant else "; see dsx --help"
        sys.stderr.write(f"dsx: unknown command {name!r}{hint}\n")
        return 2
    command = COMMANDS[name]
    if not command.package:
        return int(importlib.import_module(command.module).main(rest) or 0)
    top = command.module.partition(".")[0]
    try:
        importlib.import_module(top)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise
        missing = f"needs {command.package}, which is not installed; {in_checkout(command.package)}"
        sys.stderr.write(f"dsx {name}: {missing}\n")
        return 2
    return int(importlib.import_module(command.module).main(rest, prog=f"dsx {name}") or 0)


if __name__ == "__main__":
    sys.exit(main())
