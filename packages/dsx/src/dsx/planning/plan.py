"""`Plan`: the answer of the planner, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import PlanError

__all__ = ["Change", "Plan"]

FORMAT = 1


@dataclass(frozen=True)
class Change:
    """A change of the configuration that makes a plan fit.

    Attributes:
        what: in words.
        config: keys of the configuration by dotted path, with their new values.
        peak_bytes: of the device with it.
        step_seconds: with it, for the same number of samples.
    """

    what: str
    config: dict[str, Any]
    peak_bytes: int
    step_seconds: float


@dataclass
class Plan:
    """What a configuration needs and how long a step takes, on the rank that needs most.

    Bytes and operations are of one rank and one optimizer step; seconds are of one optimizer step.

    Attributes:
        model: its name.
        world_size, ranks_per_host: the ranks.
        machine: its figures (`Machine.to_dict`).
        config: the configuration.
        layout: sizes of the parallel axes: data, pipe, tensor, expert; stage; micro-batch; accumulation.
        parameters, trainable: elements of the model that this rank has a part of.
        tokens: of one step over all ranks; samples where the model takes no tokens.
        fits: everything has room.
        short_of: what has not: tier, bytes needed, bytes there.
        peak_bytes: the most the device holds at one time.
        peak: the same by tier.
        peak_parts: of which classes the peak of the device is made.
        fragmentation_bytes: what the device's allocator holds beyond that.
        bytes: resident model state by class and tier, when gradients are there, as the engine counts it.
        traffic: bytes that this rank sends by link: "inside host", "between hosts", and the copies "to host", "to
            device", "to disk", "from disk".
        messages: {operation: (calls, bytes sent)}.
        flops: operations of this rank, those done a second time included.
        recomputed_flops: those.
        step_seconds: length of a step.
        parts: what it is made of (`cost.Timing`), and "bubble" of a pipeline.
        tokens_per_second: over all ranks.
        mfu: model operations over what the device could do in that time.
        timeline: (lane, name, start, end).
        memory: (seconds, bytes on the device).
        changes: the cheapest changes that make it fit, best first.
        notes: what the reader should know.
        rank: which rank was the one.
    """

    model: str
    world_size: int
    ranks_per_host: int
    machine: dict[str, Any]
    config: dict[str, Any]
    layout: dict[str, int]
    parameters: int
    trainable: int
    tokens: int
    fits: bool
    short_of: tuple[str, int, int] | None
    peak_bytes: int
    peak: dict[str, int]
    peak_parts: dict[str, int]
    fragmentation_bytes: int
    bytes: dict[str, dict[str, int]]
    traffic: dict[str, float]
    messages: dict[str, tuple[int, float]]
    flops: int
    recomputed_flops: int
    step_seconds: float
    parts: dict[str, float]
    tokens_per_second: float
    mfu: float
    timeline: list[tuple[str, str, float, float]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rank: int = 0

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank sends to others in one step, as `dsx_comm.count_traffic` counts them."""
        return sum(sent for _, sent in self.messages.values())

    def state_bytes(self) -> dict[str, int]:
        """`bytes` by class alone: what `ZeroOptimizer.state_bytes` returns before the step."""
        return {kind: sum(tiers.values()) for kind, tiers in self.bytes.items()}

    def to_json(self, *, indent: int | None = None) -> str:
        """The plan as JSON text."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["changes"] = [vars(change) for change in self.changes]
        return json.dumps({"format": FORMAT, **data}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The opposite of `to_json`.

        Raises:
            PlanError: it is no plan, or one of another version.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise PlanError(f"a plan: got no JSON ({error})") from error
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise PlanError(f"a plan: got format {found}, expected {FORMAT}; make the plan anew")
        values = {key: value for key, value in data.items() if key != "format"}
        names = {item.name for item in fields(cls)}
        if set(values) != names:
            raise PlanError(f"a plan: the keys {sorted(set(values) ^ names)} do not belong to it, or are missing")
        values["changes"] = [Change(**change) for change in values["changes"]]
        values["messages"] = {op: tuple(found) for op, found in values["messages"].items()}
        for name in ("timeline", "memory"):
            values[name] = [tuple(item) for item in values[name]]
        if values["short_of"] is not None:
            values["short_of"] = tuple(values["short_of"])
        return cls(**values)
