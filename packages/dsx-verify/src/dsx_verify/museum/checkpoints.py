"""Bugs of checkpoints: what is saved and loaded without an error, and is not what was there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ..expected import Expected
from .exhibit import Exhibit, Net, Show, pairs, plain_step, rank_and_size
from .optimizers import adam

__all__ = ["CHECKPOINTS"]

Save = Callable[[str], None]


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _files(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Save, Save]:
    """Right functions: rank 0 writes all, every rank reads all."""

    def save(folder: str) -> None:
        if rank_and_size()[0] == 0:
            torch.save((model.state_dict(), optimizer.state_dict()), Path(folder) / "all.pt")
        _barrier()

    def load(folder: str) -> None:
        weights, states = torch.load(Path(folder) / "all.pt", weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)

    return save, load


def _show(model: Net, optimizer: torch.optim.Optimizer, save: Save, load: Save) -> Show:
    expected = Expected(Net, adam)
    return Show(plain_step(model, optimizer), model, expected, pairs, optimizer, {"save": save, "load": load})


def experts_of_one_rank(broken: bool) -> Show:
    """Each rank has other experts under the same names, counted from 0, so that one rank's file wins."""
    model = Net()
    optimizer = adam(model.parameters())
    save, load = _files(model, optimizer)

    def save_by_name(folder: str) -> None:
        experts = {0: model.inner.weight, 1: model.outer.weight}
        own = {"expert": experts[rank_and_size()[0] % 2].detach().clone()}
        name = "experts.pt" if broken else f"experts{rank_and_size()[0]}.pt"
        save(folder)
        for rank in range(rank_and_size()[1]):  # in turn, so that the last one wins each time
            if rank == rank_and_size()[0]:
                torch.save(own, Path(folder) / name)
            _barrier()

    def load_by_name(folder: str) -> None:
        load(folder)
        for rank, parameter in enumerate((model.inner.weight, model.outer.weight)):
            value = torch.load(Path(folder) / ("experts.pt" if broken else f"experts{rank}.pt"), weights_only=True)
            with torch.no_grad():
                parameter.view(-1)[:24].copy_(value["expert"].view(-1)[:24])

    return _show(model, optimizer, save_by_name, load_by_name)


def moments_are_lost(broken: bool) -> Show:
    """The optimizer that is resumed has no states yet, so that the loader finds nothing to fill."""
    model = Net()
    optimizer = adam(model.parameters())
    save, load = _files(model, optimizer)

    def load_into_new(folder: str) -> None:
        load(folder)
        if broken:
            optimizer.state.clear()

    return _show(model, optimizer, save, load_into_new)


def compute_weights_are_late(broken: bool) -> Show:
    """Loading fills the master weights; the weights that the forward uses follow at the next update."""
    model = Net()
    optimizer = adam(model.parameters())
    save, load = _files(model, optimizer)

    def load_masters(folder: str) -> None:
        here = {name: p.detach().clone() for name, p in model.named_parameters()}
        load(folder)
        if broken:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(here[name])

    return _show(model, optimizer, save, load_masters)


CHECKPOINTS = (
    Exhibit(
        "KempnerInstitute/KempnerForge#202", "2026-09", "expert-parallel checkpoints hold one rank's experts",
        "checkpoint", "", experts_of_one_rank,
    ),
    Exhibit(
        "KempnerInstitute/KempnerForge#115", "2026-05", "a resumed optimizer has lost its moments",
        "checkpoint", "", moments_are_lost, 1,
    ),
    Exhibit(
        "NVIDIA-NeMo/Megatron-Bridge#3397", "2026-04", "a loaded checkpoint takes effect one update late",
        "checkpoint", "", compute_weights_are_late, 1,
    ),
)  # fmt: skip
