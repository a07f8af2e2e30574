"""Open MPI: mpirun starts one agent on each host. The choice of transports and interfaces (btl, UCX) is left to the
site's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import Command, Remote, agent_argv


def commands(remote: Remote, environ: Mapping[str, str]) -> list[Command]:
    """One mpirun, which takes the variables from its own environment. ``--bind-to none``, because an agent's ranks use
    the whole host, and an MPI rank would be bound to one core.
    """
    del environ
    hosts = ",".join(f"{host}:1" for host in remote.hosts)
    exports = [word for name in remote.exports for word in ("-x", name)]
    placing = ("-n", str(len(remote.hosts)), "--host", hosts, "--map-by", "ppr:1:node", "--bind-to", "none")
    argv = ("mpirun", *placing, *exports, *remote.launcher_args, *agent_argv(remote, "--rank_from=mpi"))
    return [Command(argv, env=dict(remote.exports))]
