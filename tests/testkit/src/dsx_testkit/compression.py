"""What tests of compression under the engine share: a block, its data, and the training with and without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Block", "base_config", "batches", "train_engine", "train_plain"]


class Block(nn.Module):
    """A residual MLP of width 8 with the layers `up` and `down`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 8]."""
        return x + self.down(functional.gelu(self.up(x)))


def batches(count: int, size: int, first: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets [size, 4] of the steps from `first` on."""
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(size, 4, generator=generator)
        yield x, torch.tanh(x) * 2


def base_config(stage: int = 0, **more: Any) -> dict[str, Any]:
    """The engine's configuration, `more` of it in the place of what it has."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": None,
        **more,
    }


def train_plain(
    model: nn.Module, section: Mapping[str, Any], count: int, *, size: int = 4, max_norm: float | None = None
) -> tuple[list[float], nn.Module]:
    """The training without an engine: the losses, and the model."""
    from dsx_compress import compression_scheduler, init_compression

    model = init_compression(model, section)
    scheduler = compression_scheduler(model, section)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    losses = []
    for x, y in batches(count, size):
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, model


def train_engine(engine: Any, rows: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """The losses of one step of the engine for each pair of this rank's inputs and targets."""
    losses = []
    for x, y in rows:
        loss = engine(x.to(next(engine.module.parameters()).dtype), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
