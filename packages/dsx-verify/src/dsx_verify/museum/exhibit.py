"""The class of an exhibit, and parts that exhibits share: a small model, samples, and data parallelism by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..expected import Expected

__all__ = ["Exhibit", "Net", "Show", "average", "pairs", "plain_step", "rank_and_size", "sgd"]

Step = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Show:
    """The arguments of an audit of one system."""

    step: Step
    model: Any
    expected: Expected
    batches: Callable[[int], Any]
    optimizer: Any = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Exhibit:
    """A bug of 2025 or 2026, rebuilt in a few lines from what its thread says.

    Attributes:
        thread: repository and number of the public thread.
        date: of the thread.
        says: what happened there.
        kind: the kind of fault that an audit should name.
        name: the tensor that it should name; "" for any.
        build: (broken) -> the system, with the bug or without it.
        ranks: processes that it needs.
    """

    thread: str
    date: str
    says: str
    kind: str
    name: str
    build: Callable[[bool], Show]
    ranks: int = 2


class Net(nn.Module):
    """Two layers and a norm; the forward returns the loss."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.outer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean squared error."""
        return nn.functional.mse_loss(self.outer(torch.tanh(self.norm(self.inner(x)))), y)


def pairs(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Micro-batch `number`."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def rank_and_size() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def average(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over all ranks."""
    size = rank_and_size()[1]
    for parameter in parameters:
        if parameter.grad is not None and size > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= size


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    reduce: Callable[[], None] | None = None,
    clip: Callable[[], None] | None = None,
    share: Callable[[list[Any], Any], float] = lambda batches, _: 1 / len(batches),
) -> Step:
    """A training step by hand.

    Args:
        reduce: makes the gradients those of all ranks; None: averages them.
        clip: clips them; None: does not.
        share: (micro-batches, micro-batch) -> the factor on its loss.
    """

    def step(batches: list[Any]) -> None:
        optimizer.zero_grad()
        for batch in batches:
            (model(*batch) * share(batches, batch)).backward()
        if reduce is None:
            average(model.parameters())
        else:
            reduce()
        if clip is not None:
            clip()
        optimizer.step()

    return step


def total_norm(grads: Iterable[torch.Tensor]) -> float:
    """The L2 norm."""
    return math.sqrt(sum(float(grad.square().sum()) for grad in grads))
