"""The command `dsx-nvme`: tune, bench, explain. Each is loaded only when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from dsx_core import end_with_reader

from ._version import __version__

COMMANDS = {
    "tune": ("dsx_nvme.tune.tuner", "find the settings with which a drive is fastest"),
    "bench": ("dsx_nvme.tune.bench", "measure one setting: GB/s, latencies"),
    "explain": ("dsx_nvme.report", "what runs here, how folders are reached, and why"),
}


def ds_nvme_tune() -> int:
    """The program `ds_nvme_tune`: `dsx-nvme tune` under the name that DeepNVMe's documents use."""
    from .tune.tuner import main as run  # lazy import, as all commands

    return run(prog="ds_nvme_tune")


def ds_io() -> int:
    """The program `ds_io`: `dsx-nvme bench` under the name that DeepNVMe's documents use."""
    from .tune.bench import main as run  # lazy import, as all commands

    return run(prog="ds_io")


def usage(prog: str = "dsx-nvme") -> str:
    """What `dsx-nvme --help` prints."""
    lines = [f"usage: {prog} <command> [options]", "commands:"]
    lines += [f"  {name:8} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join([*lines, f"{prog} <command> --help tells more; {prog} --version prints the version", ""])


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx-nvme") -> int:
    """Run a command; returns its exit code, 2 for an unknown command."""
    return end_with_reader(lambda: _run(argv, prog))


def _run(argv: Sequence[str] | None, prog: str) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(usage(prog))
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"dsx-nvme {__version__}\n")
        return 0
    if words[0] not in COMMANDS:
        sys.stderr.write(f"{prog}: unknown command {words[0]!r}; expected one of {', '.join(COMMANDS)}\n")
        return 2
    return int(importlib.import_module(COMMANDS[words[0]][0]).main(words[1:]) or 0)
