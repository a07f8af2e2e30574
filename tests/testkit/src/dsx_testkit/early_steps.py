"""Updates whose early steps on the host are kept or undone: what they leave, bit by bit, and how many there were.

For tests of `offload_optimizer.step_during_backward`: a model whose gradients are as large as its attribute `strength`
is trained twice, in the plain order and with early steps, and both must have the same bits. Left out: models.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch

CLIP = 1.0
"""The largest norm of gradients."""


def everything(model: Any, optimizer: Any) -> list[Any]:
    """Copies of all that a step may change, by name: masters, states and parameters."""
    return copy.deepcopy([(s.name, s.start, s.param, s.master, dict(s.states)) for s in optimizer.slices()])


def same_bits(a: Any, b: Any) -> bool:
    """Are two nests of tensors and other values alike, bit by bit?"""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b))
    return repr(a) == repr(b)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class CountedSteps:
    """Counts announced steps, sub-groups that were stepped early, and steps that were undone.

    Args:
        patch: replaces methods of dsx_zero for as long as they are counted.
    """

    def __init__(self, patch: Any) -> None:
        from dsx_zero.step.host_thread import ApartSteps

        self.announced = self.stepped = self.undone = 0
        step, undo = ApartSteps.step, ApartSteps.undo

        def noting_step(apart: Any, numbers: Sequence[int], *args: Any, **options: Any) -> None:
            self.stepped += len(numbers)
            return step(apart, numbers, *args, **options)

        def noting_undo(apart: Any) -> None:
            self.undone += 1
            return undo(apart)

        patch.setattr(ApartSteps, "step", noting_step)
        patch.setattr(ApartSteps, "undo", noting_undo)


def update(
    model: Any, optimizer: Any, batches: Sequence[Any], strength: float, scale: float, counted: Any = None
) -> tuple[bool, Any]:
    """One update over micro-batches, of which the last one is announced. Returns overflow and norm."""
    for place, batch in enumerate(batches):
        if place == len(batches) - 1:
            said = optimizer.step_during_backward(grad_scale=scale, max_norm=CLIP)
            if counted is not None:
                counted.announced += said
        model.strength = strength * scale / len(batches)
        model(batch).backward()
    outcome = optimizer.step(grad_scale=scale, max_norm=CLIP)
    optimizer.zero_grad()
    return outcome.overflow, outcome.grad_norm


def strengths(chance: random.Random, steps: int, *, finite: bool = False) -> list[float]:
    """Mostly small gradients, some that are clipped, some that are not finite (with `finite`: very large)."""
    drawn = [chance.choices((1e-3, 30.0, float("inf"), float("nan")), (10, 3, 1, 1))[0] for _ in range(steps)]
    return [2e3 if finite and strength not in (1e-3, 30.0) else strength for strength in drawn]
