"""Chooses a global batch that fits many world sizes, and the micro-batch of each rank. Pure functions over integers.

The idea is that of DeepSpeed's elasticity (versions 0.1 and 0.2): a batch with many divisors can be divided evenly
among many numbers of devices. Candidates are the micro-batch sizes and their least common multiple, each times the
largest *highly composite number* (a number with more divisors than any smaller one) that the largest batch allows. The
candidate that the most numbers of devices divide is chosen.

Version 0.2 counts nodes: a node always has `num_gpus_per_node` devices, of which `model_parallel_size` form one
data-parallel rank. DeepSpeed 0.19.6 does not keep the bounds on devices there, can return a batch of 0 or no
micro-batch, and divides by the model-parallel size twice. Here bounds are kept, a result is always usable, and world
sizes are always numbers of devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["ElasticBatch", "ElasticSettings", "Refusal", "choose_batch", "for_world_size"]

# OEIS A002182, up to the size of batches.
HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip


@dataclass(frozen=True)
class ElasticSettings:
    """The section `elasticity` of a configuration, without its settings for times.

    Attributes:
        max_batch: largest global batch, in samples.
        micro_batches: allowed sizes of a rank's micro-batch.
        min_devices, max_devices: bounds of the world size, in devices.
        prefer_larger: of two batches that fit equally many world sizes, take the larger; see also `for_world_size`.
        version: 0.1 or 0.2.
        devices_per_node, model_parallel: version 0.2 only.
    """

    max_batch: int = 2000
    micro_batches: tuple[int, ...] = (2, 4, 6)
    min_devices: int = 1
    max_devices: int = 10000
    prefer_larger: bool = True
    version: float = 0.2
    devices_per_node: int = 1
    model_parallel: int = 1


@dataclass(frozen=True)
class ElasticBatch:
    """The chosen batch.

    Attributes:
        batch: global batch in samples.
        world_sizes: numbers of devices that divide it, ascending.
        micro: samples in a rank's micro-batch; None if no world size was given.
    """

    batch: int
    world_sizes: tuple[int, ...]
    micro: int | None = None


@dataclass(frozen=True)
class Refusal:
    """The reason that there is no batch. `world_size`: the world size does not fit, rather than the settings."""

    got: str
    expected: str
    fix: str
    world_size: bool = False

    def __str__(self) -> str:
        return f"got {self.got}; expected {self.expected}; {self.fix}"


def choose_batch(settings: ElasticSettings) -> ElasticBatch | Refusal:
    """The batch that the most world sizes divide, and these world sizes."""
    problem = _contradiction(settings)
    if problem is not None:
        return problem
    per_node, ranks_per_node = (1, 1) if settings.version < 0.2 else _node(settings)
    low = -(-settings.min_devices // per_node)  # nodes, rounded up
    high = settings.max_devices // per_node
    batch, counts = _most_divided(
        settings.micro_batches, settings.max_batch // ranks_per_node, low, high, settings.prefer_larger
    )
    if not counts:
        return Refusal(
            f"no number of devices from {settings.min_devices} to {settings.max_devices} that divides a batch of "
            f"at most {settings.max_batch} made of micro-batches {list(settings.micro_batches)}",
            "at least one",
            "raise max_train_batch_size, lower min_gpus, or allow other micro_batch_sizes",
        )
    return ElasticBatch(batch * ranks_per_node, tuple(count * per_node for count in counts))


def for_world_size(settings: ElasticSettings, devices: int) -> ElasticBatch | Refusal:
    """The batch and the micro-batch for `devices` devices.

    In version 0.2 a world size that does not divide the chosen batch gets another batch, as large (or small) as the
    settings allow. The learning rate was then chosen for a different batch. The micro-batch is the largest that fits;
    in version 0.2 without `prefer_larger` the first of the list that does.
    """
    chosen = choose_batch(settings)
    if isinstance(chosen, Refusal):
        # Where no world size fits, this one does not; DeepSpeed says it so, too.
        return replace(chosen, world_size=_contradiction(settings) is None)
    if not settings.min_devices <= devices <= settings.max_devices:
        return Refusal(
            f"{devices} devices",
            f"{settings.min_devices} to {settings.max_devices}",
            "change min_gpus or max_gpus",
            world_size=True,
        )
    if devices in chosen.world_sizes:
        ranks = devices // (1 if settings.version < 0.2 else settings.model_parallel)
        return ElasticBatch(chosen.batch, chosen.world_sizes, _micro(settings, chosen.batch // ranks))
    if settings.version < 0.2:
        return Refusal(
            f"{devices} devices",
            f"one of {_listed(chosen.world_sizes)}, which divide the batch of {chosen.batch}",
            "start the job with one of these",
            world_size=True,
        )
    return _own_batch(settings, devices)


def _own_batch(settings: ElasticSettings, devices: int) -> ElasticBatch | Refusal:
    """The batch for a world size that does not divide the common batch."""
    if devices % settings.model_parallel:
        return Refusal(
            f"{devices} devices",
            f"a multiple of model_parallel_size {settings.model_parallel}",
            "start the job with such a number",
            world_size=True,
        )
    ranks = devices // settings.model_parallel
    batches = [settings.max_batch // (m * ranks) * m * ranks for m in settings.micro_batches]
    usable = [batch for batch in batches if batch]
    if not usable:
        return Refusal(
            f"{ranks} data-parallel ranks",
            f"at most {settings.max_batch // min(settings.micro_batches)}: each takes at least one micro-batch of "
            f"{min(settings.micro_batches)} of the {settings.max_batch} samples",
            "raise max_train_batch_size or use fewer devices",
            world_size=True,
        )
    batch = max(usable) if settings.prefer_larger else min(usable)
    return ElasticBatch(batch, (devices,), _micro(settings, batch // ranks))


def _micro(settings: ElasticSettings, share: int) -> int:
    """The micro-batch of a rank that has `share` samples of the batch: the largest that divides them; in version 0.2
    the first of the list, unless larger batches are preferred.
    """
    fitting = [micro for micro in settings.micro_batches if share % micro == 0]
    return max(fitting) if settings.prefer_larger or settings.version < 0.2 else fitting[0]


def _contradiction(settings: ElasticSettings) -> Refusal | None:
    smallest = min(settings.micro_batches, default=0)
    if smallest < 1:
        return Refusal(
            f"micro_batch_sizes {list(settings.micro_batches)}", "positive sizes", "write for example [2, 4, 6]"
        )
    if max(settings.micro_batches) > settings.max_batch:
        return Refusal(
            f"max_train_batch_size {settings.max_batch} and micro_batch_sizes {list(settings.micro_batches)}",
            "micro-batches that are at most the largest batch",
            "raise max_train_batch_size or remove the larger micro-batches",
        )
    if settings.min_devices > settings.max_devices:
        return Refusal(
            f"min_gpus {settings.min_devices} and max_gpus {settings.max_devices}",
            "min_gpus at most max_gpus",
            "exchange them",
        )
    if settings.version not in (0.1, 0.2):
        return Refusal(f"version {settings.version}", "0.1 or 0.2", "leave it out for 0.2")
    if settings.version < 0.2 and settings.model_parallel > 1:
        return Refusal(
            f"model_parallel_size {settings.model_parallel} with version {settings.version}",
            "1: version 0.1 knows data-parallel ranks only",
            'set "version": 0.2',
        )
    if settings.version >= 0.2 and settings.devices_per_node % settings.model_parallel:
        return Refusal(
            f"num_gpus_per_node {settings.devices_per_node} and model_parallel_size {settings.model_parallel}",
            "a multiple",
            "set num_gpus_per_node to the number of devices of a node",
        )
    return None


def _node(settings: ElasticSettings) -> tuple[int, int]:
    """Devices and data-parallel ranks of a node."""
    return settings.devices_per_node, settings.devices_per_node // settings.model_parallel


def _most_divided(
    micro_batches: Sequence[int], max_batch: int, low: int, high: int, prefer_larger: bool
) -> tuple[int, tuple[int, ...]]:
    """The candidate that most numbers from `low` to `high` divide, and these numbers."""
    best: tuple[int, tuple[int, ...]] = (0, ())
    for batch in _candidates(micro_batches, max_batch):
        counts = _divided_by(batch, micro_batches, low, high)
        better = batch > best[0] if prefer_larger else batch < best[0]
        if len(counts) > len(best[1]) or (len(counts) == len(best[1]) and counts and better):
            best = (batch, counts)
    return best


def _candidates(micro_batches: Sequence[int], max_batch: int) -> list[int]:
    bases = {*micro_batches, math.lcm(*micro_batches)}
    return sorted(
        base * max(number for number in HIGHLY_COMPOSITE if number <= max_batch // base)
        for base in bases
        if base <= max_batch
    )


def _divided_by(batch: int, micro_batches: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """Numbers of ranks from `low` to `high` that divide `batch` into complete micro-batches of one size."""
    found: set[int] = set()
    for size in micro_batches:
        if batch % size == 0:
            passes = batch // size
            for divisor in range(1, math.isqrt(passes) + 1):
                if passes % divisor == 0:
                    found |= {divisor, passes // divisor}
    return tuple(sorted(count for count in found if low <= count <= high))


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:20]))
    return f"{shown}, ... ({len(numbers)} in all)" if len(numbers) > 20 else shown
