"""OpenSSH: one client per host. The default where pdsh is not installed, and the family with the firmest clean-up.

The client's input stays open as long as the launcher lives; the remote agent stops when it ends, so that nothing
survives Ctrl-C, a killed launcher or a lost connection. No terminal is allocated: output stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import Command, Remote, shell_script


def client(remote_args: tuple[str, ...], port: int | None) -> tuple[str, ...]:
    """The client up to the host name: never asks for a password (nobody could answer for many hosts at once)."""
    at_port = ("-p", str(port)) if port is not None else ()
    return ("ssh", "-o", "BatchMode=yes", *at_port, *remote_args)


def commands(remote: Remote, environ: Mapping[str, str]) -> list[Command]:
    """One ssh client per host, in the order of ranks."""
    del environ
    start = client(remote.launcher_args, remote.ssh_port)
    return [
        Command((*start, host, shell_script(remote, f"--node_rank={rank}", "--watch_stdin")), host=host, lifeline=True)
        for rank, host in enumerate(remote.hosts)
    ]
