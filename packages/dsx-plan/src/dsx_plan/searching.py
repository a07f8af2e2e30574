"""`search`: many configurations planned, and sorted.

Points that a configuration cannot express, and those that contradict themselves, are left out with their reason. With
`prune` points are left out, too, of which it is known without a plan that they are not better than one that was
planned: what only saves memory (recomputation, offload) where the same point fits without it, and larger micro-batches
of a point that does not fit. Of many layouts (axes of ranks and schedules) each is first planned once; those that are
much slower there than the best one are not looked at further.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .configs import ready, value_of, with_values
from .engine import EngineToPlan, engine_to_plan
from .errors import PlanError, explains_itself
from .machine import Machine
from .models import Batch
from .planner import Asked, Config, MachineLike, Model
from .plans import Plan

__all__ = ["Plans", "Skipped", "search", "usual_space"]

TENSOR, PIPE, EXPERT = "tensor_parallel.autotp_size", "pipeline.stages", "expert_parallel.autoep_size"
SCHEDULE, CHUNKS, SEQUENCE = "pipeline.schedule", "pipeline.chunks", "sequence_parallel_size"
STAGE, MICRO = "zero_optimization.stage", "train_micro_batch_size_per_gpu"
OPTIMIZER, PARAMETERS = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
AGAIN = "recompute"

_SAVING = {AGAIN: False, OPTIMIZER: None, PARAMETERS: None}
"""Settings that cost time and save memory, and the value that switches each off."""
_SIZES = (1, 2, 4, 8, 16, 32)
_AXIS = (1, 2, 4)
_LAYOUT = (TENSOR, PIPE, SCHEDULE, CHUNKS, SEQUENCE, EXPERT)
_MUCH_SLOWER = 0.7
"""A layout with less than this share of the best one's speed is planned once only. Micro-batches, stages and placement
change the speed of a layout by less, where it fits.
"""


@dataclass(frozen=True)
class Skipped:
    """A point that has no plan.

    Attributes:
        values: of its keys, by dotted path.
        reason: why.
    """

    values: dict[str, Any]
    reason: str


class Plans(list[Plan]):
    """Plans, best first. `skipped` says which points have none, and why."""

    def __init__(self, plans: Iterable[Plan], skipped: Sequence[Skipped]) -> None:
        super().__init__(plans)
        self.skipped = list(skipped)


def search(
    model: Model,
    config: Config,
    space: Mapping[str, Sequence[Any]],
    *,
    world_size: int,
    ranks_per_host: int | None = None,
    machine: MachineLike = None,
    batch: Batch | None = None,
    sequence: int | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    fp8: bool = False,
    attention: str = "flash2",
    sliced_loss: bool = False,
    prune: bool = False,
    report: Callable[[str], object] = lambda text: None,
    progress: Callable[[int, int], object] = lambda done, total: None,
    engine: EngineToPlan | None = None,
) -> Plans:
    """Plan every combination of values, and sort: what fits first, then most tokens per second.

    Args:
        space: values by dotted path of the configuration, `{"zero_optimization.stage": [1, 2, 3]}`. The word
            `recompute` stands for `plan`'s argument. A value None takes the key away.
        prune: leave out points that cannot be better than others (see the module's text).
        report: hears which point is planned.
        progress: hears how many of how many points are done, before each point and at the end.
        sliced_loss: of the points that slice layers.
        others: as for `plan`.

    Returns:
        The plans; each has its `config`. `skipped` has the points that were left out, with reasons.

    Raises:
        PlanError: no combination can be planned; the message has the last reason.
    """
    if not space or any(
        isinstance(v, (str, bytes)) or not isinstance(v, Sequence) or not len(v) for v in space.values()
    ):
        raise PlanError("space: expected lists of values by path, as {'zero_optimization.stage': [1, 2, 3]}")
    found_machine = Machine.of(machine).with_attention(attention)
    asked = Asked(
        model, world_size, ranks_per_host, found_machine, batch, sequence, loss, optimizer, engine, fp8,
        sliced_loss=sliced_loss,
    )  # fmt: skip
    base = asked.engine.read(_source(config))
    found: list[Plan] = []
    skipped: list[Skipped] = []
    past = _Past(prune, asked.engine.config_error)
    points = [dict(zip(space, values)) for values in itertools.product(*space.values())]
    if prune:
        points = _layouts_first(points, base.get(MICRO))
    for number, point in enumerate(points):
        progress(number, len(points))
        reason = past.verdict(point)
        if not reason:
            report(f"{number + 1} of {len(points)}: {_shown(point)}")
            try:
                values = {key: value for key, value in point.items() if key != AGAIN}
                answer = asked.plan(with_values(base, values), bool(point.get(AGAIN)))
                past.planned(point, answer)
                found.append(answer)
                continue
            except Exception as error:
                if not explains_itself(error):
                    raise
                reason = str(error)
                past.failed(point, error)
        skipped.append(Skipped(point, reason))
    progress(len(points), len(points))
    if not found:
        last = skipped[-1]
        raise PlanError(
            f"search: none of the combinations can be planned; the last: {_shown(last.values)}: {last.reason}"
        )
    if prune and EXPERT not in space and any(answer.layout["expert"] for answer in found):
        skipped.append(Skipped({EXPERT: "more"}, _NOT_SPREAD))
    return Plans(sorted(found, key=lambda answer: (not answer.fits, -answer.tokens_per_second)), skipped)


_NOT_SPREAD = (
    "the model has experts, and the configuration does not spread them (expert_parallel.enabled): over how many ranks"
    " is then for the model to say (MoE(ep_size=...))"
)


def usual_space(
    config: Config, world_size: int, ranks_per_host: int | None = None, engine: EngineToPlan | None = None
) -> dict[str, list[Any]]:
    """The axes that `dsx plan --search` varies, in an order in which `prune` can skip many: the axes of ranks (data,
    tensor, pipe, sequence, experts where the configuration spreads them), schedule and chunks of a pipeline, stage,
    micro-batch with the same samples in a step, placement, recomputation.
    """
    found = engine_to_plan(engine)
    given = found.read(_source(config))
    prepared = ready(_source(config), world_size, found)
    samples = prepared.micro * prepared.accumulation * prepared.layout["data"]
    sizes = [m for m in _SIZES if samples % m == 0] or [prepared.micro]
    host = {"device": "cpu"}
    experts = given.get("expert_parallel")
    spread = int(experts.get("autoep_size", 1)) if isinstance(experts, Mapping) and experts.get("enabled") else 0
    schedules = [None, "interleaved", "zb-h1", value_of(given, SCHEDULE)]
    return {
        TENSOR: _axis(world_size, prepared.layout["tensor"], most=ranks_per_host),
        PIPE: _axis(world_size, prepared.layout["pipe"]),
        SCHEDULE: list(dict.fromkeys(schedules)),
        CHUNKS: list(dict.fromkeys([None, 2, 4, value_of(given, CHUNKS)])),
        SEQUENCE: _axis(world_size, prepared.layout["sequence"], most=ranks_per_host),
        **({EXPERT: _axis(world_size, spread)} if spread else {}),
        STAGE: [1, 2, 3] if world_size > 1 else [0, 3],
        "train_batch_size": [samples],
        "gradient_accumulation_steps": [None],
        MICRO: sizes,
        PARAMETERS: [None, host],
        OPTIMIZER: [None, host],
        AGAIN: [False, True],
    }


def _axis(world_size: int, given: int, *, most: int | None = None) -> list[int]:
    """Sizes of an axis that divide the ranks, and the configured one."""
    limit = min(world_size, most or world_size)
    return sorted({n for n in _AXIS if n <= limit and world_size % n == 0} | {given})


def _source(config: Config) -> Any:
    return config if isinstance(config, (str, os.PathLike)) else dict(config)


def _shown(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in point.items())


def _cannot_be(point: Mapping[str, Any]) -> str:
    """The reason why the values of a point exclude each other; "" where they do not."""
    stages, schedule, chunks = point.get(PIPE, 0), point.get(SCHEDULE), point.get(CHUNKS)
    if stages == 1 and (schedule or chunks):
        return "schedules and chunks are of a pipeline, and there is one stage"
    if SCHEDULE in point and chunks and schedule != "interleaved":
        return "chunks are stages of a rank in the interleaved schedule"
    if CHUNKS in point and schedule == "interleaved" and not chunks:
        return "the interleaved schedule needs chunks, at least two"
    return ""


def _layout_of(point: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(point.get(key) for key in _LAYOUT)


def _layouts_first(points: list[dict[str, Any]], micro: Any) -> list[dict[str, Any]]:
    """The points in another order: first one of each layout, with the configured micro-batch and without what only
    saves memory.
    """
    first: dict[tuple[Any, ...], dict[str, Any]] = {}
    for point in points:
        plain = all(point.get(key, off) == off for key, off in _SAVING.items())
        layout = _layout_of(point)
        if plain and (layout not in first or (point.get(MICRO) == micro != first[layout].get(MICRO))):
            first[layout] = point
    if len(first) < 2:
        return points
    chosen = {id(point) for point in first.values()}
    return [*first.values(), *(point for point in points if id(point) not in chosen)]


class _Past:
    """Conclusions about a new point from earlier ones. With `prune` off: none."""

    def __init__(self, prune: bool, config_error: type[Exception]) -> None:
        self._prune, self._config_error = prune, config_error
        self._fitting: list[dict[str, Any]] = []
        self._too_big: list[dict[str, Any]] = []
        self._impossible: list[tuple[dict[str, Any], str]] = []
        self._speeds: dict[tuple[Any, ...], float] = {}

    def planned(self, point: dict[str, Any], answer: Plan) -> None:
        """A point has a plan."""
        self._speeds.setdefault(_layout_of(point), answer.tokens_per_second)
        (self._fitting if answer.fits else self._too_big).append(point)

    def failed(self, point: dict[str, Any], error: Exception) -> None:
        """A point cannot be planned. What a configuration says of itself is known again at no cost."""
        if not isinstance(error, self._config_error) and all(
            point.get(key, off) == off for key, off in _SAVING.items()
        ):
            self._impossible.append((_without(point, (*_SAVING, MICRO)), str(error)))

    def verdict(self, point: dict[str, Any]) -> str:
        """The reason that a point needs no plan; "" for one that needs it."""
        if not self._prune:
            return ""
        if excluded := _cannot_be(point):
            return excluded
        speed, best = self._speeds.get(_layout_of(point)), max(self._speeds.values(), default=0.0)
        if speed is not None and speed < _MUCH_SLOWER * best:
            return "its layout is much slower than the best one"
        layout = _without(point, (*_SAVING, MICRO))
        for other, reason in self._impossible:
            if other == layout:
                return reason
        for other in self._fitting:
            if _without(other, _SAVING) == _without(point, _SAVING) and all(
                other.get(key, off) in (off, point.get(key, off)) for key, off in _SAVING.items()
            ):
                return "it fits with less that saves memory, which is faster"
        for other in self._too_big:
            smaller = other.get(MICRO, 0) < point.get(MICRO, 0)
            if smaller and _without(other, (MICRO,)) == _without(point, (MICRO,)):
                return f"micro-batches of {other[MICRO]} do not fit already"
        return ""


def _without(point: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    left_out = set(keys)
    return {key: value for key, value in point.items() if key not in left_out}
