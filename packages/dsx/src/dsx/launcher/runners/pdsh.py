"""pdsh over ssh: one pdsh for all hosts.

pdsh replaces ``%n`` by the index of the host, so every other ``%`` of the command is doubled. Arguments of the user's
in ``PDSH_SSH_ARGS_APPEND`` stay; the port is appended to them. pdsh passes no signals on: the hosts are told to stop
through the rendezvous, and stop by themselves when pdsh is gone, because their standard input then ends.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from .base import Command, Remote, shell_script


def commands(remote: Remote, environ: Mapping[str, str]) -> list[Command]:
    """One pdsh that starts all hosts at once and returns the largest of their exit codes (-S)."""
    env = {} if environ.get("PDSH_RCMD_TYPE") else {"PDSH_RCMD_TYPE": "ssh"}
    if remote.ssh_port is not None:
        env["PDSH_SSH_ARGS_APPEND"] = f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} -p {remote.ssh_port}".strip()
    # A marker that stands nowhere else: a variable or a folder of the user's may contain any fixed word.
    marker = f"RANK_OF_THIS_HOST_{uuid.uuid4().hex}"
    script = shell_script(remote, f"--node_rank={marker}", "--watch_stdin").replace("%", "%%").replace(marker, "%n")
    # -f: all hosts at once; a job that waits for hosts pdsh has not started yet would never begin
    options = ("-S", "-b", "-f", str(len(remote.hosts)), "-w", ",".join(remote.hosts))
    return [Command(("pdsh", *options, *remote.launcher_args, script), env=env)]
