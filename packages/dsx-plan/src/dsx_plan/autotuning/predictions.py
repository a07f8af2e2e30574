"""Predicted memory and time of a candidate: the planner's answer, or a formula where it has none.

The first experiment measures one point of the space. The planner's figures are corrected by it: the difference between
measured and planned memory is added to every candidate (what the process holds besides), and scores are compared as
ratios, so that a planner that is wrong by one factor everywhere does no harm.

The formula is for models that the planner cannot trace. Memory: parameters and gradients of 2 or 4
bytes, optimizer states of 16 bytes in 16-bit training or 8 in fp32, each divided by the ranks that share it at the
stage, and the measured activations in proportion to the micro-batch. Time: the measured parts of an update, the passes
in proportion to the micro-batch above a fixed part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .space import Candidate

__all__ = ["Facts", "Prediction", "fitting", "predict", "score_of"]

HEADROOM = 0.95
"""Part of the memory that a candidate may fill by prediction: the planner is right within a few percent."""
_FIXED_PART = 0.15
"""Part of a pass's time that does not depend on the micro-batch, where nothing better is known."""


@dataclass(frozen=True)
class Facts:
    """Measurements of the first experiment. Bytes and seconds are of one rank; times are means over measured updates.

    Attributes:
        num_params, trainable_num_params: of the whole model.
        activation_mem_per_gpu: what forward and backward of one micro-batch need beyond the states.
        peak_bytes: the most memory in use: the device's, or without one the process's.
        memory_bytes: what a rank may use (`max_memory_per_gpu`).
        device: "cuda" or "cpu".
        world_size, data_parallel, ranks_per_host: ranks in all, with samples of their own, on this host.
        sixteen_bit: parameters are fp16 or bf16.
        step_seconds: an update, end to end.
        pass_seconds: forward and backward of all its micro-batches; None if they were not seen (pipelines).
        optimizer_offloaded: optimizer states are not on the device (where there is one).
        flops_per_sample: operations of forward and backward; None if they were not counted.
        startup_seconds: from the start of the process to the first update.
    """

    num_params: int
    trainable_num_params: int
    activation_mem_per_gpu: int
    peak_bytes: int
    memory_bytes: int
    device: str
    world_size: int
    data_parallel: int
    ranks_per_host: int
    sixteen_bit: bool
    step_seconds: float
    optimizer_offloaded: bool = False
    pass_seconds: float | None = None
    flops_per_sample: float | None = None
    startup_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Facts:
        """The inverse of `to_json`; further keys are ignored."""
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})


@dataclass(frozen=True)
class Prediction:
    """Memory of one rank in bytes, seconds of an update, and who says so: "planner" or "formula"."""

    peak_bytes: int
    step_seconds: float
    source: str


def predict(
    candidates: Iterable[Candidate], start: Candidate, facts: Facts, planned: Mapping[Candidate, tuple[int, float]]
) -> dict[Candidate, Prediction]:
    """A prediction for every candidate.

    Args:
        candidates: asked about.
        start: the candidate that `facts` were measured with.
        planned: the planner's (peak bytes, step seconds), where it has any; used only if it has `start` too.
    """
    if start not in planned:
        return {one: _by_formula(one, start, facts) for one in candidates}
    bytes_of_start, seconds_of_start = planned[start]
    besides = max(0, facts.peak_bytes - bytes_of_start)
    slower = facts.step_seconds / seconds_of_start
    found = {}
    for one in candidates:
        if one in planned:
            size, seconds = planned[one]
            found[one] = Prediction(size + besides, seconds * slower, "planner")
        else:
            found[one] = _by_formula(one, start, facts)
    return found


def fitting(predictions: Mapping[Candidate, Prediction], facts: Facts) -> list[Candidate]:
    """The candidates that will fit, in their order."""
    limit = HEADROOM * facts.memory_bytes
    return [one for one, prediction in predictions.items() if prediction.peak_bytes <= limit]


def largest_micro_batches(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """The candidates with the `count` largest micro-batches of each group with the same other settings."""
    known = list(candidates)
    sizes: dict[Any, set[int]] = {}
    for one in known:
        sizes.setdefault(one.group, set()).add(one.micro)
    kept = {group: sorted(found)[-count:] for group, found in sizes.items()}
    return [one for one in known if one.micro in kept[one.group]]


def score_of(candidate: Candidate, seconds: float, data_parallel: int, metric: str) -> float:
    """The score of a candidate, larger is better: updates per second for "latency", else samples per second."""
    return 1 / seconds if metric == "latency" else candidate.micro * candidate.steps * data_parallel / seconds


def _by_formula(one: Candidate, start: Candidate, facts: Facts) -> Prediction:
    grown = one.micro / start.micro
    states = _state_bytes(one, facts) - _state_bytes(start, facts)
    size = facts.peak_bytes + states + facts.activation_mem_per_gpu * (grown - 1)
    passes = facts.step_seconds if facts.pass_seconds is None else facts.pass_seconds
    each = passes / start.steps * (_FIXED_PART + (1 - _FIXED_PART) * grown)
    seconds = max(facts.step_seconds - passes, 0.0) + one.steps * each
    return Prediction(max(0, int(size)), seconds, "formula")


def _state_bytes(candidate: Candidate, facts: Facts) -> float:
    """Parameters, gradients and optimizer states of one rank, on the device that trains."""
    number, ranks, settings = facts.num_params, facts.data_parallel, candidate.changes
    short, states = (2, 16) if facts.sixteen_bit else (4, 8)
    device = settings.get("zero_optimization.offload_optimizer.device")
    away = facts.device == "cuda" and (facts.optimizer_offloaded if device is None else device != "none")
    parameters = short * number / (ranks if candidate.stage >= 3 else 1)
    gradients = short * facts.trainable_num_params / (ranks if candidate.stage >= 2 else 1)
    optimizer = states * facts.trainable_num_params / (ranks if candidate.stage >= 1 else 1)
    return parameters + gradients + (0 if away else optimizer)
