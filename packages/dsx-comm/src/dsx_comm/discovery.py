"""This process's rank, and the address of rank 0, from the environment variables that the launcher has set.

`discover` is a pure function of a mapping. It knows, in this order: the variables of torchrun (RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT), AzureML, SageMaker, Slurm steps, Open MPI, MVAPICH, and the PMI of MPICH and Intel MPI.
Rank 0's address is not in the environment under a plain mpirun over several machines; `ask_mpi` gets it from mpi4py, if
that is installed.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .errors import CommError

AZUREML_PORT = 54965


@dataclass(frozen=True)
class Rendezvous:
    """Rank, sizes and the address of rank 0. `master_addr` is None where it is still to be found."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str | None
    master_port: int
    source: str


@dataclass(frozen=True)
class _Scheduler:
    """The variables of one launcher: rank, world size, local rank, local size (None where it has none)."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str | None


OPEN_MPI = _Scheduler(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
SCHEDULERS = (
    # a batch script outside srun has SLURM_PROCID too, but no step
    _Scheduler("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None),
    OPEN_MPI,
    _Scheduler(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Scheduler("Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Scheduler("MPICH", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def discover(environ: Mapping[str, str], *, port: int = 29500, schedulers: bool = True) -> Rendezvous | None:
    """Find rank and rendezvous in `environ`; None when nothing at all is set (a single process).

    Args:
        environ: environment variables.
        port: port of rank 0 where the environment names none.
        schedulers: look beyond torchrun's variables (`auto_mpi_discovery`).

    Raises:
        CommError: some of the variables are there and others are missing, or a value is no number.
    """
    missing = [name for name in TORCHRUN if name not in environ]
    if not missing:
        return _torchrun(environ)
    found = _from_schedulers(environ, port) if schedulers else None
    if found is not None:
        return found
    # an address alone makes no job: people leave it in their profiles
    if {"RANK", "WORLD_SIZE"}.isdisjoint(environ):
        return None
    raise CommError(
        f"environment variable(s) {', '.join(missing)} missing while "
        f"{', '.join(n for n in TORCHRUN if n in environ)} set: start with `dsx launch` or torchrun, "
        "set all four, or unset them to run as one process",
        code="DSX203",
    )


def _torchrun(environ: Mapping[str, str]) -> Rendezvous:
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if "LOCAL_RANK" in environ:
        local = _number(environ, "LOCAL_RANK")
    else:
        # one machine unless the environment says otherwise
        local = rank % (_number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else size)
    found = Rendezvous(rank, size, local, environ["MASTER_ADDR"], _number(environ, "MASTER_PORT"), "environment")
    return _checked(found)


def _from_schedulers(environ: Mapping[str, str], port: int) -> Rendezvous | None:
    if "AZUREML_EXPERIMENT_ID" in environ:
        return _azureml(environ, port)
    if "SM_TRAINING_ENV" in environ:
        return _sagemaker(environ, port)
    for scheduler in SCHEDULERS:
        if scheduler.name == "Slurm" and "SLURM_STEP_ID" not in environ:
            continue
        if scheduler.rank in environ and scheduler.size in environ and scheduler.local_rank in environ:
            return _checked(_with_master(_read(scheduler, environ), environ, scheduler, port))
    return None


def _read(scheduler: _Scheduler, environ: Mapping[str, str]) -> Rendezvous:
    rank, size, local = (_number(environ, name) for name in (scheduler.rank, scheduler.size, scheduler.local_rank))
    return Rendezvous(rank, size, local, None, 0, scheduler.name)


def _with_master(found: Rendezvous, environ: Mapping[str, str], scheduler: _Scheduler, port: int) -> Rendezvous:
    address = environ.get("MASTER_ADDR")
    if address is None and scheduler.name == "Slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
        address = first_host(nodes) if nodes else None
    local_size = scheduler.local_size
    if address is None and local_size and environ.get(local_size) == str(found.world_size):
        address = "127.0.0.1"
    at = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else port
    return replace(found, master_addr=address, master_port=at)


def _azureml(environ: Mapping[str, str], port: int) -> Rendezvous:
    found = replace(_need_open_mpi(environ, "AzureML"), source="AzureML")
    single = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environ["OMPI_COMM_WORLD_SIZE"]
    if single:
        address, at = environ.get("AZ_BATCHAI_MPI_MASTER_NODE", "127.0.0.1"), AZUREML_PORT
    else:
        node = environ.get("AZ_BATCH_MASTER_NODE", "")
        address, _, text = node.partition(":")
        if not address:
            raise CommError(
                "AzureML: AZ_BATCH_MASTER_NODE (address:port of rank 0) is missing for a job of several nodes"
            )
        at = int(text) if text.isdigit() else port
    at = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else at
    return _checked(replace(found, master_addr=environ.get("MASTER_ADDR", address), master_port=at))


def _sagemaker(environ: Mapping[str, str], port: int) -> Rendezvous:
    found = replace(_need_open_mpi(environ, "SageMaker"), source="SageMaker")
    address = environ.get("MASTER_ADDR")
    if address is None and "SM_HOSTS" in environ:
        address = sorted(json.loads(environ["SM_HOSTS"]))[0]
    at = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else port
    return _checked(replace(found, master_addr=address, master_port=at))


def _need_open_mpi(environ: Mapping[str, str], platform: str) -> Rendezvous:
    missing = [n for n in (OPEN_MPI.rank, OPEN_MPI.size, OPEN_MPI.local_rank) if n not in environ]
    if missing:
        raise CommError(f"{platform}: {', '.join(missing)} missing: start the job with the platform's MPI distribution")
    return _read(OPEN_MPI, environ)


def first_host(nodelist: str) -> str:
    """The first name of a Slurm node list: "gpu[07-09,12],login" gives "gpu07"."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", nodelist.strip())
    if match is None:
        raise CommError(f"Slurm: cannot read the node list {nodelist!r}: set MASTER_ADDR")
    prefix, numbers, suffix = match.groups()
    if numbers is None:
        return prefix
    return prefix + re.split(r"[,-]", numbers)[0] + suffix


def ask_mpi(found: Rendezvous) -> Rendezvous:
    """Fill in rank 0's address with mpi4py: rank 0 broadcasts the address of its host name.

    Raises CommError when mpi4py is not installed.
    """
    try:
        from mpi4py import MPI  # pyright: ignore[reportMissingImports]  # starts MPI, so only where nothing else helps
    except ImportError as error:
        raise CommError(
            f"started by {found.source} as rank {found.rank} of {found.world_size} on several machines, but rank 0's "
            "address is not known: set MASTER_ADDR, or install mpi4py"
        ) from error
    world = MPI.COMM_WORLD
    mine = socket.gethostbyname(socket.gethostname()) if world.Get_rank() == 0 else None
    return replace(found, master_addr=world.bcast(mine, root=0))


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise CommError(f"environment variable {name}: got {environ[name]!r}, expected a whole number") from None


def _checked(found: Rendezvous) -> Rendezvous:
    if found.world_size < 1 or not 0 <= found.rank < found.world_size:
        raise CommError(f"{found.source}: got rank {found.rank} of {found.world_size}, expected 0 <= rank < world size")
    return found
