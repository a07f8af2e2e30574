"""`init_distributed`: the default process group, however the process was started.

Under torchrun, `dsx launch`, Slurm, MPI, AzureML or SageMaker the ranks find each other (`discovery.py`); with nothing
set the process is a world of its own, without a port or a file. A second call does nothing.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from dsx_core.open_files import allow_many
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from .discovery import Rendezvous, ask_mpi, discover
from .errors import CommArgumentError, CommError
from .hang import DEFAULT_NOTICE, WATCH, explain_hangs
from .on_demand import host_backend
from .open_files import check_open_files
from .shm.segment import ShmOptions

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_MINUTES = 10.0
_TIMEOUT_VARIABLES = ("DSX_TIMEOUT", "DEEPSPEED_TIMEOUT")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make the default process group unless there is one.

    Args:
        dist_backend: "nccl", "gloo", "mpi", "cpu:gloo,cuda:nccl", ...; default: where CUDA is available nccl, with gloo
            beside it for host tensors; else "dsx", shared memory, which is gloo where the ranks do not share a machine.
            Without a name gloo connects the ranks of a large job on demand ("gloo_on_demand"): a rank then waits at the
            start of its first transfer with another one until that one starts its own.
        auto_mpi_discovery: look for Slurm, MPI, AzureML and SageMaker when torchrun's variables are not all set.
        distributed_port: port of rank 0 where neither the launcher nor the caller names one.
        verbose: log one line on rank 0.
        timeout: of collectives, a timedelta or minutes; default: the variable DSX_TIMEOUT (minutes), else
            DEEPSPEED_TIMEOUT, which job scripts have, else 10 minutes.
        init_method: torch's URL ("tcp://...", "file://..."); then `rank` and `world_size` are needed.
        dist_init_required: False: do not make a group, fail if there is none.
        config: configuration whose `comms_logger` section switches the communication log (see `configure`).
        rank, world_size: override what is discovered.

    The variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set where they were missing, because
    scripts read them.

    The limit of open files is raised to the hard one: each socket counts. On CUDA devices NCCL_LAUNCH_ORDER_IMPLICIT is
    set to 1 unless it is set: collectives of several groups then begin in one order, and cannot stop each other.

    Raises:
        CommError: the environment is incomplete (the message says what is missing), the backend is not there, or the
            system allows too few open files for so many ranks.
    """
    if config is not None:
        from .log import configure

        configure(config)
    begin_in_order()
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise CommError(
            "dist_init_required is False, but there is no process group: initialise torch.distributed before"
        )
    patience = _timeout(timeout)
    explain_hangs(notice=min(DEFAULT_NOTICE, 0.45 * patience.total_seconds()))
    backend = dist_backend or _default_backend()
    automatic = dist_backend is None and backend == "gloo"
    _check_backend(backend)
    limit = allow_many()
    if init_method not in (None, "env://") or backend == "mpi":  # "env://" is what happens anyway
        check_open_files(limit, max(1, world_size), backend)
        _by_url(backend, init_method, patience, rank, world_size)
    else:
        found = _find(distributed_port, auto_mpi_discovery, rank, world_size)
        # Ranks of one machine share memory; where they turn out not to, the group is a gloo group after all.
        shares = automatic and found is not None and found.world_size > 1 and sys.platform.startswith("linux")
        if dist_backend is None and found is not None:
            backend = backend.replace("gloo", host_backend(found.world_size))
        if found is not None:
            serves = found.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            check_open_files(limit, found.world_size, "dsx" if shares else backend, serves=serves)
        _form("dsx" if shares else backend, found, patience, ShmOptions(warn=False) if shares else None)
    WATCH.arm()
    if verbose and dist.get_rank() == 0:
        logger.info("process group: %s, %d rank(s)", dist.get_backend_config(), dist.get_world_size())


def begin_in_order() -> None:
    """Let the device begin all collectives in the order in which the host issues them, whatever their group is.

    Without an order two groups could stop each other for ever where a device has room for one collective: on one rank
    a gather of parameters waits behind a transfer between experts, on another rank the transfer behind the gather.
    NCCL has a switch for it since 2.26, which an older one ignores. It reads it at the first collective, and does not
    let an operation wait for the end of the one before. A value that the user has set stays.
    """
    if torch.cuda.is_available():
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


def join_launched_ranks(*, alone: bool = False) -> None:
    """Make the default process group if a launcher started this process as one of several ranks, and there is none.

    Libraries call it before they divide something among ranks. Without it each rank would be alone: a model that was
    meant to be divided would be whole on every rank, and the ranks would train apart.

    Args:
        alone: make it where a launcher started this process as the only rank, too.

    Raises:
        CommError: see `init_distributed`.
    """
    begin_in_order()
    if dist.is_initialized():
        return
    found = discover(os.environ)
    if found is not None and (alone or found.world_size > 1):
        init_distributed()


def _timeout(value: timedelta | float | None) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if value is None:
        name = next((name for name in _TIMEOUT_VARIABLES if name in os.environ), None)
        text = str(DEFAULT_TIMEOUT_MINUTES) if name is None else os.environ[name]
        try:
            value = float(text)
        except ValueError:
            raise CommError(f"{name}: got {text!r}, expected minutes") from None
    if not value > 0:
        raise CommArgumentError(f"timeout: got {value} minutes, expected more than 0")
    return timedelta(minutes=value)


def _default_backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def _check_backend(names: str) -> None:
    """Raise `CommError` where this torch has no backend of a name in `names` ("gloo", "cpu:gloo,cuda:nccl")."""
    built_in = ("gloo", "nccl", "ucc", "xccl")
    known = [name for name in built_in if getattr(dist, f"is_{name}_available", bool)()]
    known += [name.lower() for name in dist.Backend._plugins]
    for name in (item.rpartition(":")[2].lower() for item in names.split(",")):
        if name not in known and name != "mpi":  # of that one torch is asked later
            raise CommError(
                f"dist_backend: got {names!r}, but this torch has no {name}: expected one of "
                f"{', '.join(sorted(known))}, or nothing (then what the machine has is taken)"
            )


def _by_url(backend: str, url: str | None, patience: timedelta, rank: int, world_size: int) -> None:
    if backend == "mpi" and not dist.is_mpi_available():
        raise CommError('dist_backend "mpi": this torch was built without MPI; use gloo (any launcher works with it)')
    if backend != "mpi" and url is not None and "rank=" not in url and (rank < 0 or world_size < 1):
        raise CommArgumentError(
            f"init_method {url!r} needs rank and world_size, got rank={rank}, world_size={world_size}"
        )
    dist.init_process_group(backend, init_method=url, timeout=patience, rank=rank, world_size=world_size)


def _find(port: int, schedulers: bool, rank: int, world_size: int) -> Rendezvous | None:
    """The rendezvous that the environment describes, where `rank` and `world_size` have precedence if given."""
    environ = dict(os.environ)
    if rank >= 0:
        environ["RANK"] = str(rank)
    if world_size >= 1:
        environ["WORLD_SIZE"] = str(world_size)
    if rank >= 0 and world_size >= 1:
        environ.setdefault("MASTER_PORT", str(port))
        if world_size == 1:
            environ.setdefault("MASTER_ADDR", "127.0.0.1")
    found = discover(environ, port=port, schedulers=schedulers)
    if found is not None and found.master_addr is None:
        return ask_mpi(found)
    return found


def _form(backend: str, found: Rendezvous | None, patience: timedelta, options: Any = None) -> None:
    if found is None:
        # alone: a store in this process' memory needs neither port nor file
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=patience)
        os.environ.setdefault("LOCAL_RANK", "0")
        return
    exported = {
        "RANK": found.rank,
        "WORLD_SIZE": found.world_size,
        "LOCAL_RANK": found.local_rank,
        "MASTER_ADDR": found.master_addr,
        "MASTER_PORT": found.master_port,
    }
    for name, value in exported.items():
        os.environ.setdefault(name, str(value))
    if found.source == "AzureML" and backend != "gloo":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "^docker0,lo")
    address = f"[{found.master_addr}]" if ":" in (found.master_addr or "") else found.master_addr
    url = f"tcp://{address}:{found.master_port}"
    try:
        dist.init_process_group(
            backend,
            init_method=url,
            rank=found.rank,
            world_size=found.world_size,
            timeout=patience,
            pg_options=options,
        )
    except dist.DistNetworkError as error:
        raise CommError(
            f"rank {found.rank} of {found.world_size} ({found.source}) could not meet the others at {url}: {error}",
            code="DSX205",
        ) from error
