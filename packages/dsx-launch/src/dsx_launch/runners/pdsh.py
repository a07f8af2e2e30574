"""pdsh over ssh: one pdsh for all hosts.

pdsh replaces ``%n`` by the index of the host, so every other ``%`` of the command is doubled. The user's arguments in
``PDSH_SSH_ARGS_APPEND`` are kept; the port is appended to them. pdsh does not pass signals on. So the hosts are told to
stop through the rendezvous, and they also stop when pdsh is gone, because their standard input then ends.

pdsh passes no input on either, so variables stand on its command line, which every user can read: secrets are refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from ..environment import is_secret
from ..errors import ResourceError
from .base import HOSTS_FILE, Command, Remote, naming_hosts, shell_script


def commands(remote: Remote, environ: Mapping[str, str]) -> list[Command]:
    """One pdsh that starts all hosts at once and returns the largest of their exit codes (-S).

    Raises:
        ResourceError: a variable for the hosts looks like a secret.
    """
    secrets = [name for name, value in remote.exports.items() if is_secret(name, value)]
    if secrets:
        raise ResourceError(
            f"--launcher pdsh would show {', '.join(secrets)} to all users of all hosts, on its command line; use"
            " --launcher ssh, or unset the variable(s)"
        )
    env = {} if environ.get("PDSH_RCMD_TYPE") else {"PDSH_RCMD_TYPE": "ssh"}
    if remote.ssh_port is not None:
        env["PDSH_SSH_ARGS_APPEND"] = f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} -p {remote.ssh_port}".strip()
    # A unique marker, because a variable or a folder of the user may contain any fixed word.
    marker = f"RANK_OF_THIS_HOST_{uuid.uuid4().hex}"
    script = shell_script(remote, f"--node_rank={marker}", "--watch_stdin", from_stdin=False)
    script = script.replace("%", "%%").replace(marker, "%n")
    # -f: start all hosts at the same time; a job that waits for a host that pdsh starts later would never begin
    hosts, file = naming_hosts(remote.hosts, "-w", f"-w ^{HOSTS_FILE}")
    options = ("-S", "-b", "-f", str(len(remote.hosts)), *hosts)
    return [Command(("pdsh", *options, *remote.launcher_args, script), env=env, hosts_file=file)]
