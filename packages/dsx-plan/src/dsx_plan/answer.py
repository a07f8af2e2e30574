"""Makes a `Plan` of replays: peaks, traffic and operations are counted, a machine gives them times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .allocator import fragmentation
from .casts import sides
from .communicators import communicator_bytes
from .configs import Ready
from .cost import Timing, simulate, stragglers
from .ledger import DEVICE, DISK, HOST, Peak
from .machine import Machine
from .pipelines import PipelineStep, step_of
from .plans import PipelinePlan, Plan, StagePlan
from .replay import Replay
from .trace import COPIES, COPY, MESSAGE

__all__ = ["RESERVE", "answer_of", "short_of"]

RESERVE = 0.97
"""Share of a device's memory that a process can use: the rest is the context's."""


@dataclass(frozen=True)
class _Rank:
    """The needs of one replayed rank. `memory` is that of the device; where this is the host's memory, of both tiers.
    `library` is what the communicators take of the device.
    """

    replay: Replay
    timing: Timing
    peaks: dict[str, int]
    memory: Peak
    extra: int
    library: int
    flops: int
    again: int

    @staticmethod
    def of(replay: Replay, machine: Machine, on_host: int) -> _Rank:
        timing = simulate(
            replay.trace, replay.segments, machine, ranks_per_host=on_host, waits_for_stages=replay.stage is None
        )
        ledger = replay.ledger
        peaks = {tier: peak.nbytes for tier, peak in ledger.peaks.items() if peak.nbytes}
        memory = ledger.memory if machine.device == "cpu" else ledger.peaks[DEVICE]
        extra = fragmentation(ledger.requests) if machine.streams else 0
        library = communicator_bytes(replay.communicators, machine)
        return _Rank(replay, timing, peaks, memory, extra, library, *_flops(replay))

    @property
    def needed(self) -> int:
        return self.memory.nbytes + self.extra + self.library


def answer_of(
    replays: Sequence[Replay], prepared: Ready, machine: Machine, *, model: str, world_size: int, on_host: int,
    recompute: bool,
) -> Plan:  # fmt: skip
    """The plan that replays come to.

    Args:
        replays: of every rank that differs: one, or those of a pipeline in its order.
        prepared: the configuration.
        machine: what it runs on.
        model: its name.
        world_size, on_host: ranks in all, and on a host.
        recompute: the model recomputes its blocks.
    """
    ranks = [_Rank.of(replay, machine, on_host) for replay in replays]
    most = max(ranks, key=lambda rank: rank.needed)
    shortages = (short_of(rank.needed, rank.peaks, machine, on_host) for rank in (most, *ranks))
    short = next((found for found in shortages if found), None)
    step, pipeline = None, None
    if most.replay.stage is not None:
        step = step_of(replays, [rank.timing for rank in ranks], machine)
        pipeline = _pipeline(ranks, step)
    found, timing = most.replay, most.timing
    samples = prepared.layout["data"] * prepared.micro * prepared.accumulation
    tokens = samples * found.tokens // max(1, prepared.micro)
    length = timing.step if step is None else step.seconds
    late = length * stragglers(machine, world_size)
    bubble = {} if step is None else {"bubble": max(0.0, length - timing.step)}
    length += late
    seconds = max(length, 1e-12)
    operations = sum(rank.flops - rank.again for rank in ranks) / len(ranks)
    notes = dict.fromkeys(note for rank in ranks for note in rank.replay.notes)
    if most.library:
        count = sum(group.ranks > 1 for group in found.communicators)
        notes[f"{count} communicators take about {most.library / 1e9:.1f} GB of the device beside this"] = None
    return Plan(
        model=model,
        world_size=world_size,
        ranks_per_host=on_host,
        machine=machine.to_dict(),
        config=prepared.given,
        layout={**prepared.layout, "expert": max(rank.replay.experts for rank in ranks), "recompute": int(recompute)},
        parameters=sum(r.replay.parameters - _copied(r.replay) for r in ranks),
        trainable=sum(r.replay.trainable - _copied(r.replay) for r in ranks),
        tokens=tokens,
        fits=short is None,
        short_of=short,
        peak_bytes=most.memory.nbytes,
        peak=most.peaks,
        peak_parts=most.memory.classes,
        fragmentation_bytes=most.extra,
        bytes=found.resident,
        traffic=_traffic(found),
        messages=found.messages,
        flops=most.flops,
        recomputed_flops=most.again,
        step_seconds=length,
        parts={**_parts(timing), "stragglers": late, **bubble},
        tokens_per_second=tokens / seconds,
        mfu=operations / (seconds * machine.peak(prepared.dtype)),
        timeline=_timeline(most, step),
        memory=_curve(found, timing, machine),
        notes=[*prepared.notes, *notes, *_machine_notes(machine, prepared.dtype)],
        rank=found.rank,
        pipeline=pipeline,
        phases=found.phases,
        casts=sides(found.crossings, machine, on_host),
        beside=_beside(most, machine),
    )


def _beside(rank: _Rank, machine: Machine) -> dict[str, int]:
    """Bytes of a device beside the tensors on it."""
    if machine.device == "cpu":
        return {}
    context = machine.memory_bytes - int(machine.memory_bytes * RESERVE)
    return {"allocator": rank.extra, "communicators": rank.library, "context": context}


def _copied(replay: Replay) -> int:
    return 0 if replay.stage is None else replay.stage.copied


def _pipeline(ranks: Sequence[_Rank], step: PipelineStep) -> PipelinePlan:
    schedule = ranks[0].replay.stage.schedule  # type: ignore[union-attr]
    return PipelinePlan(
        schedule=schedule.name,
        micro_batches=schedule.micro_batches,
        bubble_share=step.timeline.bubble_share,
        seconds=step.timeline.length,
        ranks=tuple(_stage(rank, place, schedule, step) for place, rank in enumerate(ranks)),
        timeline=tuple((span.rank, str(span.action), span.start, span.end) for span in step.timeline.spans),
    )


def _stage(rank: _Rank, place: int, schedule: Any, step: PipelineStep) -> StagePlan:
    replay = rank.replay
    return StagePlan(
        rank=replay.rank,
        stages=schedule.stages_of(place),
        parameters=replay.parameters,
        peak_bytes=rank.memory.nbytes,
        peak=rank.peaks,
        fragmentation_bytes=rank.extra,
        bytes=replay.resident,
        traffic=_traffic(replay),
        messages=replay.messages,
        flops=rank.flops,
        kept=sum(replay.stage.kept.values()),  # type: ignore[union-attr]
        forward_seconds=step.forward[place],
        backward_seconds=step.backward[place],
        other_seconds=step.others[place],
    )


def _timeline(rank: _Rank, step: PipelineStep | None) -> list[tuple[str, str, float, float]]:
    """The spans of a rank's step. In a pipeline they follow the schedule; all after its last backward is one span."""
    if step is None:
        return [(span.lane, span.name, span.start, span.end) for span in rank.timing.spans]
    place = rank.replay.stage.place  # type: ignore[union-attr]
    names = {"F": "forward"}
    found = [
        ("compute", names.get(span.action.kind.value, "backward"), span.start, span.end)
        for span in step.timeline.spans if span.rank == place
    ]  # fmt: skip
    end = step.ends[place]
    return [*found, ("compute", "step", end, end + step.others[place])]


def _machine_notes(machine: Machine, dtype: str) -> list[str]:
    stranger = machine.stranger()
    notes = [f"{machine.name}: {stranger}"] if stranger else []
    if dtype not in machine.flops:
        notes.append(f"{machine.name} has no rate for {dtype}; its slowest one is taken")
    return notes


def short_of(needed: int, peaks: Mapping[str, int], machine: Machine, on_host: int) -> tuple[str, int, int] | None:
    """The first memory that is too small: tier, bytes needed, bytes there; None if all of it fits.

    Args:
        needed: bytes of the device, with what is there beside tensors.
        peaks: by tier, of a rank.
        machine: what it runs on.
        on_host: ranks of a host.
    """
    on_cpu = machine.device == "cpu"  # then the device is the host's memory
    room = int(machine.memory_bytes * RESERVE)
    if not on_cpu and needed > room:
        return "device", needed, room
    needed = on_host * (needed if on_cpu else peaks.get(HOST, 0))
    room = int(machine.host_memory_bytes * RESERVE)
    if needed > room:
        return "host", needed, room
    needed, there = on_host * peaks.get(DISK, 0), machine.disk_bytes
    return ("disk", needed, there) if there is not None and needed > there else None


def _flops(found: Replay) -> tuple[int, int]:
    every = again = 0
    for start, end, times in found.segments:
        one, twice = found.trace.flops_of(start, end)
        every, again = every + times * one, again + times * twice
    return every, again


def _traffic(found: Replay) -> dict[str, float]:
    traffic = {"inside host": 0.0, "between hosts": 0.0, **dict.fromkeys(COPIES, 0.0)}
    trace = found.trace
    for start, end, times in found.segments:
        for place in range(start, end):
            if trace.kind[place] == MESSAGE:
                message = trace.messages[trace.number[place]]
                traffic["inside host"] += times * message.inside
                traffic["between hosts"] += times * message.outside
            elif trace.kind[place] == COPY:
                traffic[COPIES[trace.number[place]]] += times * trace.extra[place]
    return traffic


def _parts(timing: Timing) -> dict[str, float]:
    names = ("products", "attention", "operators", "overhead", "optimizer", "interference", "communication",
             "exposed_communication", "copies", "exposed_copies")  # fmt: skip
    return {name: getattr(timing, name) for name in names}


_MOST_POINTS = 1500


def _curve(found: Replay, timing: Timing, machine: Machine) -> list[tuple[float, int]]:
    """Memory over time, at most so many points: of each stretch its greatest value."""
    both, ends = machine.device == "cpu", timing.at
    points = [
        (ends[min(place, len(ends) - 1)] if ends else 0.0, device + both * host)
        for place, device, host in found.ledger.curve
    ]
    stretch = max(1, -(-len(points) // _MOST_POINTS))
    kept = [max(points[i : i + stretch], key=lambda p: p[1]) for i in range(0, len(points), stretch)]
    latest, ordered = 0.0, []
    for at, nbytes in kept:
        latest = max(latest, at)
        ordered.append((latest, nbytes))
    return ordered
