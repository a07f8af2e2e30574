"""What a collective and the arithmetic of quantised messages cost here: measured in a fraction of a second.

All ranks send at the same time, as they do in training, so that ranks of a node share its link. The numbers of the
slowest rank count, on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..collectives import ReduceOp, all_gather_into_tensor, all_reduce
from ..exchange import barrier
from ..stopwatch import shortest_time
from .blocks import BlockFormat, dequantize_rows, quantize_rows
from .hierarchy import Hierarchy

__all__ = ["LinkRates", "PathRate", "measure_rates"]

_BYTES = 1 << 20
_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class PathRate:
    """A way between ranks. `latency`: seconds of a message of next to nothing between two ranks; `rate`: bytes per
    second that one rank sends while all of them do.
    """

    latency: float
    rate: float


@dataclass(frozen=True)
class LinkRates:
    """Attributes: the ways `inside` nodes and `between` them (None where there is none), and seconds per element to
    `encode` and to `decode` quantised values.
    """

    inside: PathRate | None
    between: PathRate | None
    encode: float
    decode: float


def measure_rates(hierarchy: Hierarchy, bits: int, device: torch.device, group: Any = None) -> LinkRates:
    """Measure (collective over the ranks of `group`).

    Args:
        hierarchy: nodes and ranks, of this rank. Its groups must not be in use.
        bits: of quantised values.
        device: where they are.
        group: the ranks that are to have the same numbers; None: all.
    """
    inside = _path(hierarchy.intra, hierarchy.devices, device)
    between = _path(hierarchy.inter, hierarchy.nodes, device)
    form = BlockFormat(bits)
    values = torch.randn(1, _ELEMENTS, device=device)
    messages = quantize_rows(values, form)
    encode = shortest_time(lambda: quantize_rows(values, form), device, lambda: None) / _ELEMENTS
    decode = shortest_time(lambda: dequantize_rows(messages, form, values), device, lambda: None) / _ELEMENTS
    numbers = [*inside, *between, encode, decode]
    found = torch.tensor(numbers, dtype=torch.float64, device=device)
    all_reduce(found, op=ReduceOp.MAX, group=group)
    slowest = found.tolist()
    return LinkRates(_rate(*slowest[:2]), _rate(*slowest[2:4]), *slowest[4:])


def _path(group: Any, size: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a message of nothing, and per byte; zeros for a group that is not there."""
    if group is None or size == 1:
        return 0.0, 0.0

    def gather(numel: int) -> float:
        source = torch.zeros(numel, device=device)
        out = torch.empty(size * numel, device=device)
        return shortest_time(lambda: all_gather_into_tensor(out, source, group=group), device, lambda: barrier(group))

    least, numel = gather(1), _BYTES // 4
    latency = least / (size - 1)
    return latency, max(gather(numel) - least, 0.1 * least, 1e-9) / ((size - 1) * 4 * numel)


def _rate(latency: float, per_byte: float) -> PathRate | None:
    return PathRate(latency, 1 / per_byte) if per_byte else None
