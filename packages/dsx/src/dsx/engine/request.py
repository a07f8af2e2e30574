"""What the caller of `dsx.initialize` brought, and how many ranks there are before a process group says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Request:
    """What the caller of `initialize` brought, checked."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None
    model_parameters: list[Any] | None
    lr_scheduler: Any
    training_data: Any
    collate_fn: Callable[[list[Any]], Any] | None
    mpu: Any
    distributed_port: int
    dist_init_required: bool | None


def launched_world_size() -> int:
    """Number of ranks, known without a process group: the group's if there is one, else the launcher's, else 1."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
