"""``dsx ssh``: run one command on every host of a hostfile. At most 64 run at the same time; each output line begins
with its host.

Every word of the command is quoted, so that it arrives on the hosts as it was typed. To use the syntax of the remote
shell (pipes, variables), pass the command as one word: ``dsx ssh -f hosts 'ps aux | grep train'``.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dsx_core import CommandParser

from ._version import __version__
from .errors import ResourceError
from .failures import shell_code
from .options import DEFAULT_HOSTFILE
from .resources import apply_filters, read_hostfile
from .runners.ssh import WINDOW, client


def remote_text(words: Sequence[str]) -> str:
    """The command for the remote shell: a single word unchanged (a shell line), several words each quoted."""
    return words[0] if len(words) == 1 else shlex.join(words)


def parser(prog: str = "dsx ssh") -> argparse.ArgumentParser:
    made = CommandParser(
        prog=prog,
        allow_abbrev=False,
        description="Run one command on every host of a hostfile.",
        version=f"dsx-launch {__version__}",
    )
    made.add_argument(
        "-f", "-H", "--hostfile", default=DEFAULT_HOSTFILE, help="lines 'host slots=N' (default: %(default)s)"
    )
    made.add_argument("-i", "--include", default="", metavar="FILTER", help="only these hosts: host@host")
    made.add_argument("-e", "--exclude", default="", metavar="FILTER", help="all but these hosts")
    made.add_argument("--ssh_port", "--ssh-port", type=int, metavar="PORT", help="port of the ssh servers")
    made.add_argument(
        "--ssh_args", "--ssh-args", default="", metavar="TEXT", help="further arguments for ssh, as one text"
    )
    made.add_argument("--dry_run", "--dry-run", action="store_true", help="print every command and run nothing")
    made.add_argument("words", nargs=argparse.PARSER, metavar="command", help="the command and its arguments")
    return made


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx ssh") -> int:
    """Run the command line; returns 0 if the command succeeded on every host, otherwise its largest exit code."""
    args = parser(prog).parse_args(argv)
    words = args.words[1:] if args.words[0] == "--" and len(args.words) > 1 else args.words
    try:
        hosts = list(apply_filters(read_hostfile(args.hostfile), include=args.include, exclude=args.exclude))
    except ResourceError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    start = client(tuple(shlex.split(args.ssh_args)), args.ssh_port)
    commands = {host: (*start, host, remote_text(words)) for host in hosts}
    if args.dry_run:
        sys.stdout.write("".join(f"{shlex.join(command)}\n" for command in commands.values()))
        return 0
    with ThreadPoolExecutor(max_workers=min(WINDOW, len(hosts))) as pool:
        return max(pool.map(lambda host: _run(host, commands[host]), hosts))


def _run(host: str, command: Sequence[str]) -> int:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        sys.stderr.write(f"{host}: {error}\n")
        return 1
    with process:
        for line in process.stdout or ():
            sys.stdout.write(f"{host}: {line.rstrip()}\n")
        sys.stdout.flush()
    return shell_code(process.returncode)
