"""Choosing schedule, split and number of micro-batches from measured layer costs and a memory cap.

The planner simulates every candidate (`schedule.simulate`) with the measured times and returns the fastest one that
fits. It runs no model; the layer costs are measured before, in one pass over the layers (`measure.py`).

The memory of a candidate on rank r is the bytes of the states of its layers' parameters, plus those of the activations
that the schedule keeps at one time. Buffers of the communication library and of the allocator are not counted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import ScheduleError
from .partition import split_by_weights
from .schedule import BUILDERS, Kind, Schedule, StageTimes, build, simulate

_TRAINING = tuple(name for name in BUILDERS if name != "inference")


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer for one sample.

    Attributes:
        forward: seconds of the forward.
        input_backward: seconds of the gradient of its input.
        weight_backward: seconds of the gradients of its parameters.
        activation_bytes: bytes that autograd keeps from forward to backward.
        parameter_bytes: bytes of parameters, gradients and optimizer states together.
        overhead: seconds of one forward and backward together that do not depend on the number of samples.
    """

    forward: float
    input_backward: float
    weight_backward: float
    activation_bytes: int = 0
    parameter_bytes: int = 0
    overhead: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """One way to run the step, with its predicted cost.

    Attributes:
        schedule: name of the schedule.
        chunks: stages per rank.
        micro_batches: number of micro-batches.
        parts: first layer of every stage, followed by the number of layers.
        seconds: simulated length of the step.
        bytes_per_rank: for each rank, bytes of parameter states and kept activations.
        bubble_share: idle share of all ranks' time, from 0 to 1.
    """

    schedule: str
    chunks: int
    micro_batches: int
    parts: tuple[int, ...]
    seconds: float
    bytes_per_rank: tuple[int, ...]
    bubble_share: float

    def build(self, ranks: int) -> Schedule:
        """The schedule of this candidate."""
        return build(self.schedule, ranks, self.micro_batches, self.chunks)


def stage_times(layers: Sequence[LayerCost], parts: Sequence[int], samples: float) -> tuple[StageTimes, ...]:
    """Seconds per stage for a micro-batch of `samples` samples: forward, input backward and weight backward.

    Args:
        layers: measured costs, in the model's order (`measure_layers`).
        parts: first layer of every stage, followed by the number of layers: [0, 3, 6] are two stages of three layers.
        samples: number of samples of a micro-batch.
    """
    found = []
    for first, end in itertools.pairwise(parts):
        part = layers[first:end]
        fixed = sum(c.overhead for c in part) / 3
        found.append(
            StageTimes(
                samples * sum(c.forward for c in part) + fixed,
                samples * sum(c.input_backward for c in part) + fixed,
                samples * sum(c.weight_backward for c in part) + fixed,
            )
        )
    return tuple(found)


def candidates(
    layers: Sequence[LayerCost],
    ranks: int,
    batch: int,
    *,
    memory: int | None = None,
    schedules: Sequence[str] = _TRAINING,
    micro_batches: Sequence[int] | None = None,
    max_chunks: int = 4,
    latency: float = 0.0,
) -> list[Candidate]:
    """All candidates that fit into the memory, fastest first.

    Args:
        layers: cost of every layer for one sample.
        ranks: number of ranks of the pipeline.
        batch: number of samples of a step, over all micro-batches of this pipeline.
        memory: bytes that a rank may use; None: no limit.
        schedules: names of the schedules to consider.
        micro_batches: numbers of micro-batches to consider; default: all divisors of `batch`.
        max_chunks: largest number of stages per rank for the interleaved schedule.
        latency: seconds that a message between two ranks takes.

    Raises:
        ScheduleError: a size is below 1, a name is unknown, or no candidate fits. The message then says which candidate
            needs the least memory, and how much.
    """
    if ranks < 1 or batch < 1 or not layers:
        raise ScheduleError(f"got {len(layers)} layers, {ranks} ranks, a batch of {batch}: expected at least 1 of each")
    unknown = [name for name in schedules if name not in _TRAINING]
    if unknown:
        raise ScheduleError(f"schedules: got {unknown[0]!r}, expected some of {', '.join(_TRAINING)}")
    counts = micro_batches or [m for m in range(1, batch + 1) if batch % m == 0]
    found = [
        _cost(layers, name, ranks, chunks, m, batch, latency)
        for m in counts for name in schedules for chunks in _chunk_counts(name, ranks, m, len(layers), max_chunks)
    ]  # fmt: skip
    if not found:
        raise ScheduleError(f"{len(layers)} layers on {ranks} ranks: no schedule of {', '.join(schedules)} takes them")
    fits = [c for c in found if memory is None or max(c.bytes_per_rank) <= memory]
    if not fits:
        least = min(found, key=lambda c: max(c.bytes_per_rank))
        raise ScheduleError(
            f"memory: got {memory} bytes per rank, the least that a candidate needs is {max(least.bytes_per_rank)} "
            f"({least.schedule}, {least.micro_batches} micro-batches); use more ranks, ZeRO or activation checkpoints"
        )
    return sorted(fits, key=lambda c: (c.seconds, max(c.bytes_per_rank)))


def plan(layers: Sequence[LayerCost], ranks: int, batch: int, **options: object) -> Candidate:
    """The fastest candidate that fits into the memory.

    Args:
        layers: measured costs, in the model's order (`measure_layers`).
        ranks: number of ranks of the pipeline.
        batch: number of samples of a step, over all micro-batches.
        options: keyword arguments of `candidates`, such as `memory` in bytes per rank.

    Raises:
        ScheduleError: as for `candidates`.
    """
    return candidates(layers, ranks, batch, **options)[0]  # type: ignore[arg-type]


def _chunk_counts(name: str, ranks: int, micro_batches: int, layers: int, most: int) -> list[int]:
    if name == "interleaved":
        counts = range(2, most + 1) if micro_batches % ranks == 0 else range(0)
    else:
        counts = (2,) if name == "zbv" else (1,)
    return [c for c in counts if c * ranks <= layers]


def _cost(
    layers: Sequence[LayerCost], name: str, ranks: int, chunks: int, m: int, batch: int, latency: float
) -> Candidate:
    schedule = build(name, ranks, m, chunks)
    weights = [c.forward + c.input_backward + c.weight_backward for c in layers]
    parts = split_by_weights(weights, schedule.stages)
    samples = batch / m
    timeline = simulate(schedule, stage_times(layers, parts, samples), latency=latency)
    kept = _kept_bytes(
        schedule, [samples * sum(c.activation_bytes for c in layers[a:b]) for a, b in itertools.pairwise(parts)]
    )
    states = [
        sum(c.parameter_bytes for s in schedule.stages_of(r) for c in layers[parts[s] : parts[s + 1]])
        for r in range(ranks)
    ]
    total = tuple(int(a + b) for a, b in zip(kept, states))
    return Candidate(name, chunks, m, tuple(parts), timeline.length, total, timeline.bubble_share)


def _kept_bytes(schedule: Schedule, per_stage: Sequence[float]) -> list[float]:
    """For each rank, the largest number of bytes of activations that it keeps at one time."""
    found = []
    for row in schedule.actions:
        live = most = 0.0
        for action in row:
            if action.kind is Kind.FORWARD:
                live += per_stage[action.stage]
                most = max(most, live)
            elif action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                live -= per_stage[action.stage]
        found.append(most)
    return found


def save_costs(layers: Sequence[LayerCost], path: str | Path) -> None:
    """Write layer costs as JSON, for `dsx-pipe plan`."""
    Path(path).write_text(json.dumps([asdict(c) for c in layers], indent=1) + "\n")


def load_costs(path: str | Path) -> list[LayerCost]:
    """Read what `save_costs` wrote.

    Raises:
        ScheduleError: the file is not a list of layer costs; the message names the entry that is wrong.
    """
    try:
        entries = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ScheduleError(f"{path}: expected JSON ({error})") from None
    if not isinstance(entries, list):
        raise ScheduleError(f"{path}: got {type(entries).__name__}, expected a list with one object per layer")
    found = []
    for i, entry in enumerate(entries):
        try:
            found.append(LayerCost(**entry))
        except TypeError as error:
            raise ScheduleError(f"{path}: layer {i}: {error}") from None
    return found
