"""What the caller of `dsx.initialize` brought, and which of how many ranks this is before a process group says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import EngineArgumentError


@dataclass(frozen=True)
class Request:
    """What the caller of `initialize` brought, checked. `store`: in the place of the folder for state on disk, a store
    (`dsx_zero.homes.stored.TensorStore`, with `close`).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None
    model_parameters: list[Any] | None
    lr_scheduler: Any
    training_data: Any
    collate_fn: Callable[[list[Any]], Any] | None
    mpu: Any
    distributed_port: int
    dist_init_required: bool | None
    store: Any = None


def launched_as() -> tuple[int, int]:
    """Rank and number of ranks, known without a process group: the group's if there is one, else the launcher's, else
    (0, 1).

    The launcher is `dsx launch`, torchrun, srun, mpirun, ...: whatever `dsx_comm.init_distributed` would join.

    Raises:
        CommError: the environment says half of it.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    from dsx_comm.discovery import discover  # lazy import: not needed where there is a group

    found = discover(os.environ)
    return (0, 1) if found is None else (found.rank, found.world_size)


def joins_others(dist_init_required: bool | None) -> bool:
    """Whether `initialize` has to make a process group: where it is asked to, or where a launcher started this process
    as one of several.

    Raises:
        EngineArgumentError: it must not make one, there is none, and the ranks would each train alone.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    size = launched_as()[1]
    if dist_init_required is False and size > 1:
        raise EngineArgumentError(
            f"initialize(dist_init_required=False): got {size} ranks by the environment and no process group, expected"
            " one; call dsx.init_distributed first, or leave the argument out"
        )
    return (size > 1 or "RANK" in os.environ) if dist_init_required is None else dist_init_required
