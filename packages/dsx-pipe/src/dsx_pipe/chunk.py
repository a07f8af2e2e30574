"""The layers of one stage, run one after the other. Some of them may be recomputed in the backward."""

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
    """The choice of the layers that are recomputed.

    Attributes:
        interval: number of layers that form one recomputed block; 0: nothing is recomputed.
        function: (run, *tensors) -> tensors, with the meaning of `torch.utils.checkpoint.checkpoint`.
        classes: names of the classes that may be recomputed; None: every block that has parameters.
    """

    interval: int = 0
    function: Callable[..., Any] = recompute
    classes: frozenset[str] | None = None

    def applies_to(self, block: Sequence[tuple[str, Any]], value: Any) -> bool:
        """True if a block of (class name, layer) pairs is recomputed for this input."""
        if not self.interval or not torch.is_grad_enabled() or not any(t.requires_grad for t in flatten(value)[1]):
            return False
        if self.classes is not None:
            return all(name in self.classes for name, _ in block)
        return any(isinstance(f, nn.Module) and any(True for _ in f.parameters()) for _, f in block)


class Chunk(nn.Module):
    """One stage.

    Args:
        layers: (name, module or function) per layer. Modules are registered under these names.
        classes: class name per layer.
        recomputation: which layers are recomputed.
    """

    def __init__(self, layers: Sequence[tuple[str, Any]], classes: Sequence[str], recomputation: Recomputation) -> None:
        super().__init__()
        self._layers, self._classes = [call for _, call in layers], list(classes)
        self.recomputation = recomputation
        for name, call in layers:
            if isinstance(call, nn.Module):
                self.add_module(name, call)

    def forward(self, value: Any) -> Any:
        """Run all layers, each on the output of the previous one, and return the output of the last."""
        block = self.recomputation.interval or len(self._layers) or 1
        for start in range(0, len(self._layers), block):
            calls = self._layers[start : start + block]
            named = list(zip(self._classes[start : start + block], calls))
            if self.recomputation.applies_to(named, value):
                value = _run_recomputed(self.recomputation.function, calls, value)
            else:
                value = _run_layers(calls, value)
        return value


def _run_layers(calls: Sequence[Any], value: Any) -> Any:
    for call in calls:
        value = call(value)
    return value


def _run_recomputed(function: Callable[..., Any], calls: Sequence[Any], value: Any) -> Any:
    """Run layers through a checkpoint function. It takes and returns tensors only, so containers are flattened."""
    structure, tensors, others = flatten(value)
    made: list[tuple[Structure, list[Any]]] = []

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, found, rest = flatten(_run_layers(calls, unflatten(structure, list(given), others)))
        made.append((out, rest))
        return tuple(found)

    found = function(run, *tensors)
    out, rest = made[0]
    return unflatten(out, [found] if isinstance(found, torch.Tensor) else list(found), rest)
