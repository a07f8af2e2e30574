"""The choice of the next candidate, and of the end of a search: the three values of `tuner_type`.

A tuner is a pure function of what was measured so far, so a search that was killed goes on as if it had not been.
`gridsearch` and `random` go through the stages one after the other; `tuner_num_trials` and `tuner_early_stopping` hold
for each stage. `model_based` sees all stages at once and tries what is expected to improve on the best the most.

No tuner tries what needs at least the memory of something that ran out of it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .space import Candidate
from .surrogate import believe, expected_improvement

__all__ = ["InOrder", "Limits", "Measured", "ModelBased", "Stop", "Tuner", "make_tuner"]

WORTH_A_TRIAL = 0.005
"""Expected gain below which `model_based` stops, as a part of the best score."""


@dataclass(frozen=True)
class Measured:
    """A candidate that was tried.

    Attributes:
        score: positive, larger is better; None if the experiment failed.
        out_of_memory: it failed for want of memory.
    """

    candidate: Candidate
    score: float | None
    out_of_memory: bool = False


@dataclass(frozen=True)
class Limits:
    """`trials` per stage at most; `patience` trials without progress end a search, 0: they do not."""

    trials: int
    patience: int


@dataclass(frozen=True)
class Stop:
    """The search is over."""

    reason: str


class Tuner(Protocol):
    """Chooses candidates."""

    def propose(self, history: Sequence[Measured]) -> Candidate | Stop: ...


def make_tuner(
    kind: str, candidates: Sequence[Candidate], predicted: Mapping[Candidate, float], limits: Limits
) -> Tuner:
    """The tuner of a `tuner_type`.

    Args:
        kind: "gridsearch", "random" or "model_based".
        candidates: what may be tried.
        predicted: their predicted scores; also those of everything in the history, where it is known.
        limits: see `Limits`.
    """
    if kind == "model_based":
        return ModelBased(candidates, predicted, limits)
    order = list(candidates)
    if kind == "random":
        random.Random(0).shuffle(order)  # the same order in a search that is gone on with
    return InOrder(sorted(order, key=lambda one: one.stage), limits)


def since_best(scores: Sequence[float | None]) -> int:
    """The number of trials after the best one; that of all trials if none worked."""
    best, since = 0.0, 0
    for score in scores:
        since += 1
        if score is not None and score > best:
            best, since = score, 0
    return since


def _left(candidates: Sequence[Candidate], history: Sequence[Measured]) -> list[Candidate]:
    tried = {one.candidate for one in history}
    too_big = [one.candidate for one in history if one.out_of_memory]
    return [one for one in candidates if one not in tried and not any(one.harder_than(big) for big in too_big)]


class InOrder:
    """Goes through the candidates as they come, stage by stage (stable: within a stage the order is kept)."""

    def __init__(self, candidates: Sequence[Candidate], limits: Limits) -> None:
        self._candidates, self._limits = tuple(candidates), limits

    def propose(self, history: Sequence[Measured]) -> Candidate | Stop:
        """The first candidate of the first stage that is not over."""
        for one in _left(self._candidates, history):
            scores = [past.score for past in history if past.candidate.stage == one.stage]
            patient = not self._limits.patience or since_best(scores) < self._limits.patience
            if len(scores) < self._limits.trials and patient:
                return one
        return Stop("every stage is searched, or has had its experiments")


class ModelBased:
    """Tries what is expected to gain most, given the predictions and what was measured (`surrogate.py`)."""

    def __init__(self, candidates: Sequence[Candidate], predicted: Mapping[Candidate, float], limits: Limits) -> None:
        self._candidates, self._predicted, self._limits = tuple(candidates), dict(predicted), limits

    def propose(self, history: Sequence[Measured]) -> Candidate | Stop:
        """The candidate with the greatest expected gain; the best prediction while nothing was measured."""
        limits = self._limits
        if limits.patience and since_best([one.score for one in history]) >= limits.patience:
            return Stop(f"{limits.patience} experiments without progress (tuner_early_stopping)")
        spent = [one.candidate.stage for one in history]
        left = [one for one in _left(self._candidates, history) if spent.count(one.stage) < limits.trials]
        if not left:
            return Stop("everything that fits was tried, or each stage has had its experiments (tuner_num_trials)")
        known = {one.candidate: one.score for one in history if one.score and one.candidate in self._predicted}
        best = max((one.score for one in history if one.score), default=0.0)
        if not known:
            return max(left, key=lambda one: self._predicted[one])
        beliefs = believe(known, self._predicted, left)
        gains = {one: expected_improvement(beliefs[one], best) for one in left}
        chosen = max(left, key=lambda one: (gains[one], self._predicted[one]))
        if gains[chosen] < WORTH_A_TRIAL:
            return Stop(f"no candidate is expected to gain {100 * WORTH_A_TRIAL:g} % or more")
        return chosen
