"""The layers of one stage, run one after the other, with recomputation of some in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from .runtime.structure import Structure, flatten, unflatten

recompute = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


@dataclass(frozen=True)
class Recomputation:
    """Which layers are recomputed.

    Attributes:
        interval: that many layers together form one recomputed block; 0 is none.
        function: (run, *tensors) -> tensors; as `torch.utils.checkpoint.checkpoint`.
        classes: names of the classes that may be recomputed; None: every block that has parameters.
    """

    interval: int = 0
    function: Callable[..., Any] = recompute
    classes: frozenset[str] | None = None

    def takes(self, block: Sequence[tuple[str, Any]], value: Any) -> bool:
        """True if a block is to be recomputed for this input."""
        if not self.interval or not torch.is_grad_enabled() or not any(t.requires_grad for t in flatten(value)[1]):
            return False
        if self.classes is not None:
            return all(name in self.classes for name, _ in block)
        return any(isinstance(f, nn.Module) and any(True for _ in f.parameters()) for _, f in block)


class Chunk(nn.Module):
    """One stage.

    Args:
        steps: (name, what to call) per layer. Modules are registered under these names.
        classes: class name per layer.
        recomputation: which layers are recomputed.
    """

    def __init__(self, steps: Sequence[tuple[str, Any]], classes: Sequence[str], recomputation: Recomputation) -> None:
        super().__init__()
        self._steps, self._classes = [call for _, call in steps], list(classes)
        self.recomputation = recomputation
        for name, call in steps:
            if isinstance(call, nn.Module):
                self.add_module(name, call)

    def forward(self, value: Any) -> Any:
        """The output of the last layer."""
        block = self.recomputation.interval or len(self._steps) or 1
        for start in range(0, len(self._steps), block):
            calls = self._steps[start : start + block]
            named = list(zip(self._classes[start : start + block], calls))
            if self.recomputation.takes(named, value):
                value = _recomputed(self.recomputation.function, calls, value)
            else:
                value = _run(calls, value)
        return value


def _run(calls: Sequence[Any], value: Any) -> Any:
    for call in calls:
        value = call(value)
    return value


def _recomputed(function: Callable[..., Any], calls: Sequence[Any], value: Any) -> Any:
    """Run through a checkpoint function, which sees tensors only: containers are taken apart on both sides."""
    structure, tensors, others = flatten(value)
    made: list[tuple[Structure, list[Any]]] = []

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, found, rest = flatten(_run(calls, unflatten(structure, list(given), others)))
        made.append((out, rest))
        return tuple(found)

    found = function(run, *tensors)
    out, rest = made[0]
    return unflatten(out, [found] if isinstance(found, torch.Tensor) else list(found), rest)
