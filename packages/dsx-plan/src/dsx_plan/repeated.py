"""Plans of models with very many blocks that are alike: a few of them are replayed, and stand for the others.

A block adds the same bytes, messages, operations and seconds each time, once there are enough of them for buckets and
limits to have their full size. So a model is planned with few blocks, with more, and with twice as many; if a line
through the first two meets the third, all numbers follow it to the whole depth. Otherwise twice as many are taken. A
plan then costs the same for a hundred blocks and for ten thousand.

Left out: pipelines, where stages have few blocks already; timelines and curves, which are those of the few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .answer import short_of
from .errors import PlanError
from .machine import Machine
from .plans import Plan

__all__ = ["Repeated"]

FEWEST, MOST = 8, 128
"""Blocks of the first plan, and of the last one that is tried before the model is planned whole."""
STRAIGHT = 0.003
"""The share by which a number of the third plan may be off the line through the first two."""

_SAME = frozenset({
    "model", "world_size", "ranks_per_host", "machine", "config", "layout", "tokens", "fits", "short_of", "timeline",
    "memory", "changes", "without", "notes", "rank", "pipeline", "phases", "mfu", "tokens_per_second",
})  # fmt: skip
"""Fields of a plan that no line goes through."""


class Repeated:
    """Plans a model by few of its blocks.

    Args:
        make: for a number of blocks, what plans the model with so many: (configuration, recompute) -> `Plan`.
        blocks: of the model.
    """

    def __init__(self, make: Callable[[int], Callable[[Any, bool], Plan]], blocks: int) -> None:
        self._make, self._blocks = make, blocks

    def plan(self, config: Any, recompute: bool = False) -> Plan:
        """The plan for a configuration, without changes.

        Raises:
            PlanError: the model is in stages, or cannot be planned.
        """
        few = FEWEST
        while 2 * few < self._blocks and few <= MOST:
            counts = (few, few + few // 2, 2 * few)
            plans = [self._make(count)(config, recompute) for count in counts]
            if plans[0].pipeline is not None:
                raise PlanError("alike: got a model in stages, expected one without; stages have few blocks already")
            if _off(_at(plans[0], plans[1], 2.0), _at(plans[2], plans[2], 0.0)) <= STRAIGHT:
                share = (self._blocks - counts[1]) / (counts[2] - counts[1])
                return _whole(plans[2], _at(plans[1], plans[2], share), self._blocks, counts)
            few *= 2
        return self._make(self._blocks)(config, recompute)


def _at(first: Plan, second: Plan, share: float) -> dict[str, Any]:
    """The numbers on the line from one plan (0) to another (1)."""
    names = [item.name for item in dataclasses.fields(Plan) if item.name not in _SAME]
    return {name: _on_line(getattr(first, name), getattr(second, name), share) for name in names}


def _on_line(a: Any, b: Any, share: float) -> Any:
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        return {
            key: _on_line(a.get(key, _zero(b.get(key))), b.get(key, _zero(a.get(key))), share) for key in {**a, **b}
        }
    if isinstance(a, tuple):
        return tuple(_on_line(x, y, share) for x, y in zip(a, b))
    value = a + (b - a) * share
    return max(0, round(value)) if isinstance(a, int) and isinstance(b, int) else max(0.0, value)


def _zero(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {}
    return (0, 0.0) if isinstance(value, tuple) else 0


def _off(said: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """The largest relative distance of the numbers by which a plan is judged."""
    pairs = [(said[name], found[name]) for name in ("peak_bytes", "step_seconds", "flops", "parameters")]
    pairs += [(said["peak"].get(tier, 0), nbytes) for tier, nbytes in found["peak"].items()]
    pairs.append((_sent(said), _sent(found)))
    return max(abs(a - b) / b if b else float(bool(a)) for a, b in pairs)


def _sent(numbers: Mapping[str, Any]) -> float:
    return sum(nbytes for _, nbytes in numbers["messages"].values())


def _whole(few: Plan, numbers: dict[str, Any], blocks: int, counts: tuple[int, ...]) -> Plan:
    seconds = max(numbers["step_seconds"], 1e-12)
    numbers["tokens_per_second"] = few.tokens / seconds
    done = few.flops - few.recomputed_flops
    rate = (numbers["flops"] - numbers["recomputed_flops"]) / max(done, 1) * few.step_seconds / seconds
    numbers["mfu"] = few.mfu * rate
    machine = Machine.from_dict(few.machine)
    beside = {**few.beside, "allocator": numbers["fragmentation_bytes"]} if few.beside else {}
    needed = numbers["peak_bytes"] + sum(beside.get(name, 0) for name in ("allocator", "communicators"))
    short = short_of(needed, numbers["peak"], machine, few.ranks_per_host)
    note = (
        f"{blocks} blocks by plans of {', '.join(map(str, counts))}: timeline and memory over time are those of"
        f" {counts[-1]}"
    )
    return dataclasses.replace(
        few, **{**numbers, "beside": beside}, fits=short is None, short_of=short, notes=[*few.notes, note]
    )  # fmt: skip
