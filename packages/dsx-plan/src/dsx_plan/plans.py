"""`Plan`: the answer of the planner, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .errors import PlanError

__all__ = ["Change", "PipelinePlan", "Plan", "StagePlan"]

FORMAT = 7


@dataclass(frozen=True)
class Change:
    """A change of the configuration, and what it changes.

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


@dataclass(frozen=True)
class StagePlan:
    """The needs of one rank of a pipeline. Bytes are of one rank and one optimizer step.

    Attributes:
        rank: global rank that was replayed.
        stages: of the model, that it holds.
        parameters: elements in them.
        peak_bytes, peak, fragmentation_bytes, bytes, traffic, messages, flops: as those of `Plan`.
        kept: the most micro-batches whose activations it keeps at one time, over its stages.
        forward_seconds, backward_seconds: of one micro-batch through all its stages.
        other_seconds: what it does beside them in a step: reductions that nothing hides, the update.
    """

    rank: int
    stages: tuple[int, ...]
    parameters: int
    peak_bytes: int
    peak: dict[str, int]
    fragmentation_bytes: int
    bytes: dict[str, dict[str, int]]
    traffic: dict[str, float]
    messages: dict[str, tuple[int, float]]
    flops: int
    kept: int
    forward_seconds: float
    backward_seconds: float
    other_seconds: float

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StagePlan:
        """The opposite of `dataclasses.asdict`, after a way through JSON."""
        values = {**data, "stages": tuple(data["stages"]), "messages": _messages(data["messages"])}
        return cls(**values)


@dataclass(frozen=True)
class PipelinePlan:
    """The plan of a pipeline as a whole.

    Attributes:
        schedule: its name.
        micro_batches: of a step.
        bubble_share: share of all ranks' time in which they wait for each other, by the schedule (`dsx_pipe`).
        seconds: from the first forward to the last backward.
        ranks: what each rank needs, in the order of the pipeline.
        timeline: (place in the pipeline, action, start, end); an action reads "2F0": stage, what it does, micro-batch.
    """

    schedule: str
    micro_batches: int
    bubble_share: float
    seconds: float
    ranks: tuple[StagePlan, ...]
    timeline: tuple[tuple[int, str, float, float], ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PipelinePlan:
        """The opposite of `dataclasses.asdict`, after a way through JSON."""
        ranks = tuple(StagePlan.from_dict(one) for one in data["ranks"])
        timeline = tuple((int(place), str(action), start, end) for place, action, start, end in data["timeline"])
        return cls(**{**data, "ranks": ranks, "timeline": timeline})


@dataclass
class Plan:
    """The memory and the step time of a configuration, on the rank that needs most.

    Bytes and operations are of one rank and one optimizer step; seconds are of one optimizer step.

    Attributes:
        model: its name.
        world_size, ranks_per_host: the ranks.
        machine: its figures (`Machine.to_dict`).
        config: the configuration.
        layout: sizes of the parallel axes: data, pipe, tensor, expert (0: no experts); stage; micro-batch;
            accumulation.
        parameters, trainable: elements of the model that this rank has a part of; in a pipeline of all its stages.
        tokens: of one step over all ranks; samples where the model takes no tokens.
        fits: everything has room.
        short_of: what has not: tier, bytes needed, bytes there.
        peak_bytes: the most that the device holds at one time. On a CPU the device is the host's memory, and what is
            placed in host memory is in it.
        peak: the most by tier; tiers reach it at different times.
        peak_parts: of which classes `peak_bytes` is made.
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
        memory: (seconds, bytes on the device); what is in it is that of `peak_bytes`.
        changes: the cheapest changes that make it fit, best first.
        without: for each setting that is there to send less, the numbers without it (`pays.plans_without`).
        notes: what the reader should know.
        rank: which rank was the one.
        pipeline: of a model in stages: each of them, and how they work together.
        phases: bytes on the device by phase (train, sleep, generate, push) and class, where a generator was named.
        beside: bytes on a device that are no tensors: "allocator" (segments of PyTorch's allocator that are split and
            not in use: `fragmentation_bytes`), "communicators" (NCCL's buffers), "context" (kept free for CUDA's
            context and libraries).
        casts: seconds of a step for casts of gradients and parameters between device and host, by class and side
            (`casts.sides`).
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
    without: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rank: int = 0
    pipeline: PipelinePlan | None = None
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    casts: dict[str, dict[str, float]] = field(default_factory=dict)
    beside: dict[str, int] = field(default_factory=dict)

    @property
    def held(self) -> dict[str, int]:
        """All that a device holds at the peak, by class, largest first: tensors, and what is beside them."""
        whole = {**self.peak_parts, **self.beside}
        return {name: nbytes for name, nbytes in sorted(whole.items(), key=lambda item: -item[1]) if nbytes}

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
        for name in ("changes", "without"):
            data[name] = [vars(change) for change in data[name]]
        data["pipeline"] = None if self.pipeline is None else asdict(self.pipeline)
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
            raise PlanError(f"a plan: got format {found}, expected {FORMAT}; make the plan again")
        values = {key: value for key, value in data.items() if key != "format"}
        names = {item.name for item in fields(cls)}
        if set(values) != names:
            raise PlanError(f"a plan: the keys {sorted(set(values) ^ names)} do not belong to it, or are missing")
        for name in ("changes", "without"):
            values[name] = [Change(**change) for change in values[name]]
        values["messages"] = _messages(values["messages"])
        if values["pipeline"] is not None:
            values["pipeline"] = PipelinePlan.from_dict(values["pipeline"])
        for name in ("timeline", "memory"):
            values[name] = [tuple(item) for item in values[name]]
        if values["short_of"] is not None:
            values["short_of"] = tuple(values["short_of"])
        return cls(**values)


def _messages(found: Mapping[str, Any]) -> dict[str, tuple[int, float]]:
    """Calls and bytes, which JSON has as lists."""
    return {op: (calls, sent) for op, (calls, sent) in found.items()}
