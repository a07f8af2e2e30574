"""The ``dsx`` command. Its subcommands are the entry points ``dsx.commands`` of the installed packages.

Each is imported only when it is called, so that ``dsx --help`` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ._version import __version__
from .commands import installed_commands, run_command
from .errors import in_checkout

__all__ = ["TASKS", "main"]

TASKS = {
    "before a job runs": ("plan", "config", "autotune", "elastic", "doctor", "bench", "verify"),
    "run a job": ("launch", "ssh", "simcuda"),
    "after a job has run": ("report", "checkpoint", "explain"),
    "one part at a time": ("pipe", "data", "compress", "nvme", "sparse", "ops"),
    "the command line itself": ("completion",),
}
"""The headings of ``dsx --help`` in their order, each with its commands. Commands of other packages come last."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns its exit code, 2 for an unknown name, 130 after Ctrl-C, or 141 if the reader of the
    output has ended.
    """
    commands = installed_commands()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return run_command(commands, words, prog="dsx", version=f"dsx {__version__}", tasks=TASKS)
    except ModuleNotFoundError as error:
        command = commands.get(words[0]) if words else None
        if command is None or (error.name or "").partition(".")[0] != command.target.partition(".")[0]:
            raise
        missing = f"needs {command.distribution}, which is not installed; {in_checkout(command.distribution)}"
        sys.stderr.write(f"dsx {words[0]}: {missing}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
