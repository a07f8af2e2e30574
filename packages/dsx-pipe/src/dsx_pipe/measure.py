"""Measuring what layers cost, for the planner and for partition_method="time".

Each layer runs alone on the output of the previous layer. Forward, input backward and weight backward are timed
separately, at two batch sizes, so that the part of the time that does not depend on the size is known too. The bytes
that autograd keeps are counted by `saved_tensors_hooks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from dsx_core.device import Device
from torch import nn

from .errors import PartitionError
from .layers import LayerSpec, flatten_layers
from .planner import LayerCost
from .runtime.backward import input_backward
from .runtime.data import split_batch
from .runtime.stage import as_input
from .runtime.structure import flatten


def measure_layers(
    layers: Any,
    inputs: Any,
    *,
    repeats: int = 3,
    state_bytes_per_parameter: int = 16,
    clock: Callable[[], float] | None = None,
) -> list[LayerCost]:
    """Measure what each layer costs for one sample, in this process alone.

    Args:
        layers: as for `PipelineModule`; each spec is built, measured and dropped before the next one.
        inputs: a batch for the first layer, of at least two samples along the first dimension of its tensors.
        repeats: number of timed runs; their median is taken.
        state_bytes_per_parameter: bytes of parameter, gradient and optimizer states per element; 16 is Adam in fp32.
        clock: seconds, read between passes; None: those of this machine. A planner gives its own.

    Raises:
        PartitionError: the batch has fewer than two samples.
    """
    rows = [t.shape[0] for t in flatten(inputs)[1] if t.dim()]
    if not rows or min(rows) < 2:
        raise PartitionError(
            "measure_layers: expected a batch of at least two samples, to find costs that do not depend on their number"
        )
    half = next(iter(split_batch(inputs, None, 2)))[0]
    samples, fewer = min(rows), flatten(half)[1][0].shape[0]
    costs, value, small = [], inputs, half
    now = clock or _now
    for layer in flatten_layers(layers):
        module = layer.build() if isinstance(layer, LayerSpec) else layer
        large_times, kept, value = _measure(module, value, repeats, now)
        small_times, _, small = _measure(module, small, repeats, now)
        slopes = [max(a - b, 0.0) / (samples - fewer) for a, b in zip(large_times, small_times)]
        per_sample = [min(s, a / samples) for s, a in zip(slopes, large_times)]
        fixed = sum(large_times) - samples * sum(per_sample)
        count = sum(p.numel() for p in module.parameters()) if isinstance(module, nn.Module) else 0
        forward, of_input, of_weight = per_sample
        costs.append(LayerCost(forward, of_input, of_weight, kept // samples, count * state_bytes_per_parameter, fixed))
    return costs


def _measure(module: Any, value: Any, repeats: int, now: Callable[[], float]) -> tuple[list[float], int, Any]:
    """(median seconds of forward, input and weight backward; bytes that autograd keeps; the next layer's input)."""
    rows: list[list[float]] = []
    kept, output = 0, None
    for _ in range(repeats + 1):  # the first run warms up
        seen: dict[int, int] = {}
        leaf_input = _as_differentiable_input(value)
        hooks = torch.autograd.graph.saved_tensors_hooks(_byte_counter(seen, module), lambda t: t)
        start = now()
        with hooks:
            output = module(leaf_input)
        middle = now()
        outputs = [t for t in flatten(output)[1] if t.requires_grad]
        leaves = [t for t in flatten(leaf_input)[1] if t.requires_grad]
        later = input_backward(outputs, [torch.ones_like(t) for t in outputs], leaves)
        end = now()
        later.run()
        rows.append([middle - start, end - middle, now() - end])
        kept = sum(seen.values())
        if isinstance(module, nn.Module):
            module.zero_grad()
    return [median(column) for column in zip(*rows[1:])], kept, as_input(output)


def _byte_counter(seen: dict[int, int], module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    own = {p.untyped_storage().data_ptr() for p in module.parameters()} if isinstance(module, nn.Module) else set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:  # parameters take no additional memory
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a graph that holds its own output is never freed

    return pack


def _as_differentiable_input(value: Any) -> Any:
    """The value as the input of a later stage: floating-point tensors require a gradient."""
    fresh = as_input(value)
    for tensor in flatten(fresh)[1]:
        if tensor.is_floating_point():
            tensor.requires_grad_()
    return fresh


def _now() -> float:
    Device.current().synchronize()
    return time.perf_counter()


__all__: Sequence[str] = ["measure_layers"]
