"""The command `dsx-nvme`: tune, bench, explain. Each is loaded only when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

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


def usage() -> str:
    """What `dsx-nvme --help` prints."""
    lines = ["usage: dsx-nvme <command> [options]", "commands:"]
    lines += [f"  {name:8} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join([*lines, "dsx-nvme <command> --help tells more", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code, 2 for an unknown command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0 if words else 2
    if words[0] not in COMMANDS:
        sys.stderr.write(f"dsx-nvme: unknown command {words[0]!r}; expected one of {', '.join(COMMANDS)}\n")
        return 2
    return int(importlib.import_module(COMMANDS[words[0]][0]).main(words[1:]) or 0)
