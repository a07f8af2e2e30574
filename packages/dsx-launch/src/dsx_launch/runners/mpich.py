"""The Hydra family: MPICH, Intel MPI and MVAPICH2."""

from __future__ import annotations

from collections.abc import Mapping

from .base import HOSTS_FILE, Command, Remote, agent_argv, naming_hosts


def _hydra(remote: Remote, settings: Mapping[str, str], *passing: str) -> Command:
    """One mpirun that starts one agent per host. ``settings`` are variables too; the job's override them.

    Args:
        passing: what makes this mpirun pass variables of its own environment on; used if there are any.
    """
    env = {**settings, **remote.exports}
    hosts, file = naming_hosts(remote.hosts, "-hosts", f"-f {HOSTS_FILE}")
    placing = ("-n", str(len(remote.hosts)), "-ppn", "1", *hosts)
    words = passing if env else ()
    argv = ("mpirun", *placing, *words, *remote.launcher_args, *agent_argv(remote, "--rank_from=mpi"))
    return Command(argv, env=env, hosts_file=file)


def commands(remote: Remote, environ: Mapping[str, str]) -> list[Command]:
    """MPICH does not pin processes unless asked."""
    del environ
    return [_hydra(remote, {}, "-genvall")]


def commands_impi(remote: Remote, environ: Mapping[str, str]) -> list[Command]:
    """Intel MPI pins processes by default. That is switched off for the agents, unless the user has set it."""
    settings = {} if "I_MPI_PIN" in environ else {"I_MPI_PIN": "0"}
    return [_hydra(remote, settings, "-genvlist", ",".join({**settings, **remote.exports}))]


def commands_mvapich(remote: Remote, environ: Mapping[str, str]) -> list[Command]:
    """MVAPICH pins each process to a core by default. That is switched off for the agents, unless the user has set it
    (exported as MV2*).
    """
    return [_hydra(remote, {} if "MV2_ENABLE_AFFINITY" in environ else {"MV2_ENABLE_AFFINITY": "0"}, "-genvall")]
