"""Open MPI: mpirun starts one agent on each host. The choice of transports and interfaces (btl, UCX) is left to the
site's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import HOSTS_FILE, Command, Remote, agent_argv, naming_hosts


def commands(remote: Remote, environ: Mapping[str, str]) -> list[Command]:
    """One mpirun, which takes the variables from its own environment. ``--bind-to none``, because an agent's ranks use
    the whole host, and an MPI rank would be bound to one core.
    """
    del environ
    hosts, file = naming_hosts(remote.hosts, "--host", f"--hostfile {HOSTS_FILE}", of_one=":1", in_file=" slots=1")
    exports = [word for name in remote.exports for word in ("-x", name)]
    placing = ("-n", str(len(remote.hosts)), *hosts, "--map-by", "ppr:1:node", "--bind-to", "none")
    argv = ("mpirun", *placing, *exports, *remote.launcher_args, *agent_argv(remote, "--rank_from=mpi"))
    return [Command(argv, env=dict(remote.exports), hosts_file=file)]
