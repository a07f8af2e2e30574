"""The Hydra family: MPICH and Intel MPI."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Command, Remote, agent_argv


def hydra(remote: Remote, settings: Mapping[str, str]) -> Command:
    """One mpirun that starts one agent per host. ``settings`` are exported too; the job's variables override them."""
    exports = {**settings, **remote.exports}
    words = [word for name, value in exports.items() for word in ("-genv", name, value)]
    placing = ("-n", str(len(remote.hosts)), "-ppn", "1", "-hosts", ",".join(remote.hosts))
    return Command(("mpirun", *placing, *words, *remote.launcher_args, *agent_argv(remote, "--rank_from=mpi")))


def commands(remote: Remote, environ: Mapping[str, str]) -> list[Command]:
    """MPICH does not pin processes unless asked."""
    del environ
    return [hydra(remote, {})]


def commands_impi(remote: Remote, environ: Mapping[str, str]) -> list[Command]:
    """Intel MPI pins processes by default. That is switched off for the agents, unless the user has set it."""
    return [hydra(remote, {} if "I_MPI_PIN" in environ else {"I_MPI_PIN": "0"})]
