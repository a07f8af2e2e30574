"""Finds which host of the job this is, from the environment variables of a batch system or MPI. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import ResourceError

_RANK_VARIABLES = {
    "mpi": ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
    "slurm": ("SLURM_NODEID", "SLURM_PROCID"),
}


def host_rank_from(environ: Mapping[str, str], hosts: Sequence[str], source: str = "") -> int:
    """The index of this host in ``hosts``, from the environment variables of MPI or Slurm (``source``: "mpi", "slurm"
    or "" for either).

    Slurm sorts its hosts, so there the host's name is used instead of its number.
    """
    if source != "mpi" and environ.get("SLURMD_NODENAME") in hosts:
        return list(hosts).index(environ["SLURMD_NODENAME"])
    names = _RANK_VARIABLES.get(source) or (*_RANK_VARIABLES["mpi"], *_RANK_VARIABLES["slurm"])
    for name in names:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    if len(hosts) == 1:
        return 0
    raise ResourceError(
        f"cannot tell which of the hosts {', '.join(hosts)} this is: none of {', '.join(names)} is set; pass"
        " --node_rank"
    )
