"""What tests of activation checkpointing share: an oracle of peaks, the allocator's bytes, training loops, and watchers
of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "OperatorWatch",
    "bytes_after_forward",
    "gradients_of_steps",
    "is_product",
    "losses_when_sharded",
    "simulated_peak",
]


def simulated_peak(costs: Sequence[Any], how: Sequence[str], outside: int) -> int:
    """The most bytes of a forward and a backward that are alive at a time, event by event.

    Args:
        costs: `dsx_activations.plan.BlockCost` of each block.
        how: what is kept of each: "all", "inputs" or "operators" (its `selective`).
        outside: bytes that are alive between forward and backward only.
    """
    alive, peak, kept = 0, 0, []
    for cost, what in zip(costs, how, strict=True):
        alive += cost.outside
        own = {"all": cost.kept, "inputs": cost.inputs}.get(what)
        kept.append(cost.inputs + cost.selective.kept if own is None else own)
        alive += kept[-1]
        peak = max(peak, alive)
    peak = max(peak, alive + outside)
    for cost, what, own in reversed(list(zip(costs, how, kept))):
        again = {"all": 0, "inputs": cost.kept}.get(what)
        peak = max(peak, alive + (cost.selective.alive - cost.selective.kept if again is None else again))
        alive -= own + cost.outside
    return peak


def bytes_after_forward(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that a forward pass leaves allocated, from the allocator's own events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = model(x)
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    loss.backward()
    return sum(event.nbytes() for event in events)


def gradients_of_steps(
    model: nn.Module, shape: Sequence[int], *, steps: int = 3, twice: bool = False
) -> list[torch.Tensor]:
    """Train on inputs of `shape`: the loss and the gradients of each step, and the buffers at the end.

    `twice`: two backwards through each graph.
    """
    torch.manual_seed(1)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step in range(steps):
        loss = model(torch.randn(*shape, generator=torch.Generator().manual_seed(step)))
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
        gradients: list[Any] = [p.grad for p in model.parameters()]
        found += [loss.detach(), *(gradient.clone() for gradient in gradients)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def losses_when_sharded(
    model: nn.Module,
    stage: int,
    rank: int,
    shape: Sequence[int],
    *,
    lr: float = 0.01,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
) -> tuple[torch.Tensor, Any]:
    """Shard the model and train it for three steps on this rank's inputs: the losses, and what `prepare` has returned
    for the sharded model before the first.
    """
    import dsx_zero

    config = {"stage": stage, "stage3_param_persistence_threshold": 0}
    model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.SGD(p, lr=lr), config=config)
    prepared = prepare(model)
    torch.manual_seed(rank)
    found = []
    for step in range(3):
        loss = model(torch.randn(*shape, generator=torch.Generator().manual_seed(10 * step + rank)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    optimizer.release()
    return torch.stack(found), prepared


def is_product(function: object) -> bool:
    """Whether an operator is a matrix product or attention."""
    return "mm" in str(function) or "attention" in str(function)


class OperatorWatch(TorchDispatchMode):
    """Calls `see(operator, result)` for every operator inside the block."""

    def __init__(self, see: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self._see(function, out)
        return out
