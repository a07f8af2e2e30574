"""The arguments of `dsx.initialize`, and the rank of this process before there is a process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import EngineArgumentError

if TYPE_CHECKING:
    from dsx_comm import RankSets
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Request:
    """The checked arguments of `initialize`, and what extensions have made of them.

    Attributes:
        store: a store (`dsx_zero.homes.stored.TensorStore`, with `close`) that is used for state on disk instead of a
            folder.
        mesh: numbers of data-parallel and sequence-parallel ranks.
        device_mesh: of the data-parallel ranks, in the place of `mesh` and `mpu`.
        ranks_of: the argument of `dsx_zero.shard`; None: the groups of all ranks.
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
    mesh: tuple[int, int] | None = None
    device_mesh: DeviceMesh | None = None
    ranks_of: RankSets | Callable[[nn.Parameter], RankSets] | None = None


def launched_as() -> tuple[int, int]:
    """Rank and number of ranks: from the process group if there is one, otherwise from the launcher, otherwise (0, 1).

    The launcher is `dsx launch`, torchrun, srun, mpirun, ...: any that `dsx_comm.init_distributed` supports.

    Raises:
        CommError: the environment is incomplete.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    from dsx_comm.discovery import discover  # lazy import: not needed where there is a group

    found = discover(os.environ)
    return (0, 1) if found is None else (found.rank, found.world_size)


def joins_others(dist_init_required: bool | None) -> bool:
    """Whether `initialize` has to make a process group: if it is asked to, or if a launcher started this process as one
    of several.

    Raises:
        EngineArgumentError: it must not make a group, there is none, and each rank would train alone.
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
