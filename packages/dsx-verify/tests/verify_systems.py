"""Systems for tests of audits: models, batches, and a training step of each kind of wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from dsx_verify import Expected
from torch import nn


class Net(nn.Module):
    """An MLP that returns its loss; with dropout, tied weights, a batch norm or a frozen layer if asked for."""

    def __init__(self, drop: float = 0.0, norm: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10) if norm else nn.LayerNorm(10)
        self.outer = nn.Linear(10, 3)
        self.drop = nn.Dropout(drop)
        self.inner.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.outer(self.drop(torch.tanh(self.norm(self.inner(x))))), y)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embed = nn.Embedding(13, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.body(self.embed(tokens))))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Turned(Net):
    """Its inputs are turned by angles in a complex buffer, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.polar(torch.ones(3), torch.tensor([0.5, 1.5, 2.5])), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (3, 2))) * self.angles
        return super().forward(torch.view_as_real(turned).flatten(-2), y)


def pairs(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(number))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def wrap(kind: str, model: nn.Module) -> nn.Module:
    """The model as a system holds it. Lazy imports: a test of one kind loads no other."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for part in model.children():
            if list(part.parameters()) and not isinstance(model, Tied):
                fully_shard(part)
        return fully_shard(model)
    return model


def step_of(model: nn.Module, optimizer: Any, expected: Expected, schedule: Any = None) -> Callable[[list[Any]], Any]:
    """An ordinary training step."""

    def step(micro_batches: list[Any]) -> list[float]:
        losses = []
        optimizer.zero_grad()
        for micro, batch in enumerate(micro_batches):
            last = micro == len(micro_batches) - 1
            quiet = contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()
            with quiet, torch.autocast("cpu", dtype=torch.bfloat16, enabled=expected.autocast):
                loss = expected.loss(model, batch)
                (loss / len(micro_batches)).backward()
            losses.append(float(loss.detach()))
        if expected.max_norm and hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(expected.max_norm)  # FSDP1: torch's function sees this rank's part only
        elif expected.max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), expected.max_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        return losses

    return step
