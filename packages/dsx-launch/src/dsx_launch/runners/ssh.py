"""OpenSSH: one client per host. It is the default if pdsh is not installed, and has the most reliable clean-up.

The client's input stays open as long as the launcher lives. The remote agent stops when its input ends, so that no
process survives Ctrl-C, a killed launcher or a lost connection. No terminal is allocated, so the output is not changed.
The variables for the hosts come on that input, before everything else.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import Command, Remote, shell_script

WINDOW = 64
"""The most short connections open at the same time: each costs this machine 10 to 30 ms of a core to begin."""


def client(remote_args: tuple[str, ...], port: int | None) -> tuple[str, ...]:
    """The client's command up to the host name. It never asks for a password, because several hosts would ask at
    once.
    """
    at_port = ("-p", str(port)) if port is not None else ()
    return ("ssh", "-o", "BatchMode=yes", *at_port, *remote_args)


def commands(remote: Remote, environ: Mapping[str, str]) -> list[Command]:
    """One ssh client per host, in the order of ranks."""
    del environ
    start = client(remote.launcher_args, remote.ssh_port)
    return [
        Command(
            (*start, host, shell_script(remote, f"--node_rank={rank}", "--watch_stdin", from_stdin=True)),
            host=host,
            lifeline=True,
            exports=remote.exports,
        )
        for rank, host in enumerate(remote.hosts)
    ]
