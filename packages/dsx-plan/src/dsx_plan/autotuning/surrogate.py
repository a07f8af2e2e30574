"""Estimates for candidates that were not measured: a Gaussian process on the error of the predictions.

A prediction is wrong by a factor. The factor has a part that is the same everywhere (the machine is slower than
thought) and a part that is alike for similar candidates (stage 3 is slower than thought). So the model is, for
candidate c with predicted score p(c),

    log score(c) = log p(c) + b + e(c),   b ~ N(0, 10^2),   e ~ GP(0, s^2 exp(-d(c, c') / 2)),   noise 2 %

where d counts differences: each doubling of the micro-batch or of the accumulation is 1 and 0.5, another stage is 1,
another value of any other key is 0.5. The spread s is the most probable one of `SPREADS`, given the measurements and a
planner that is usually within a tenth: ln s ~ N(ln 0.1, 0.7^2). Formulas: Rasmussen and Williams, Gaussian Processes
for Machine Learning, (2.25), (2.26) and (2.30); expected improvement: Jones, Schonlau and Welch 1998, (15).

A dozen measurements are a lot here, so this is plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .space import Candidate

__all__ = ["Belief", "believe", "distance", "expected_improvement"]

NOISE = 0.02
SPREADS = (0.05, 0.1, 0.2, 0.4)
_SHARED_VARIANCE = 100.0
_USUAL_SPREAD, _SPREAD_DEVIATION = 0.1, 0.7
_REACH = 2.0


@dataclass(frozen=True)
class Belief:
    """Mean and standard deviation of the natural logarithm of a score."""

    mean: float
    deviation: float


def distance(a: Candidate, b: Candidate) -> float:
    """The distance between two candidates (see the module)."""
    batches = abs(math.log2(a.micro / b.micro)) + 0.5 * abs(math.log2(a.steps / b.steps))
    mine, yours = dict(a.others), dict(b.others)
    changed = sum(mine.get(path) != yours.get(path) for path in {*mine, *yours})
    return batches + (a.stage != b.stage) + 0.5 * changed


def believe(
    measured: Mapping[Candidate, float], predicted: Mapping[Candidate, float], asked: Sequence[Candidate]
) -> dict[Candidate, Belief]:
    """Beliefs about candidates.

    Args:
        measured: scores of candidates; positive, larger is better.
        predicted: predicted scores of these and of those asked for; positive.
        asked: the candidates.
    """
    seen = list(measured)
    errors = [math.log(measured[one] / predicted[one]) for one in seen]
    spread = max(SPREADS, key=lambda s: _likelihood(seen, errors, s))
    lower = _cholesky(_covariances(seen, spread, noise=True))
    weights = _solve_transposed(lower, _solve(lower, errors))
    found = {}
    for one in asked:
        row = [_covariance(one, other, spread) for other in seen]
        shift = sum(weight * value for weight, value in zip(weights, row))
        explained = sum(value * value for value in _solve(lower, row))
        variance = max(0.0, _covariance(one, one, spread) - explained)
        found[one] = Belief(math.log(predicted[one]) + shift, math.sqrt(variance))
    return found


def expected_improvement(belief: Belief, best: float) -> float:
    """The expected excess of the logarithm of the score over that of `best`; failures to exceed count as 0."""
    gain = belief.mean - math.log(best)
    if belief.deviation == 0.0:
        return max(0.0, gain)
    z = gain / belief.deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return gain * 0.5 * (1 + math.erf(z / math.sqrt(2))) + belief.deviation * density


def _covariance(a: Candidate, b: Candidate, spread: float) -> float:
    return _SHARED_VARIANCE + spread**2 * math.exp(-distance(a, b) / _REACH)


def _covariances(seen: Sequence[Candidate], spread: float, *, noise: bool) -> list[list[float]]:
    return [
        [_covariance(a, b, spread) + (NOISE**2 if noise and i == j else 0.0) for j, b in enumerate(seen)]
        for i, a in enumerate(seen)
    ]


def _likelihood(seen: Sequence[Candidate], errors: Sequence[float], spread: float) -> float:
    """The log probability of a spread and the errors, up to a constant."""
    prior = -0.5 * (math.log(spread / _USUAL_SPREAD) / _SPREAD_DEVIATION) ** 2
    lower = _cholesky(_covariances(seen, spread, noise=True))
    white = _solve(lower, errors)
    return prior - 0.5 * sum(value * value for value in white) - sum(math.log(lower[i][i]) for i in range(len(seen)))


def _cholesky(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """The lower triangle L with L L^T = matrix (symmetric, positive definite)."""
    size = len(matrix)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = math.sqrt(rest) if i == j else rest / lower[j][j]
    return lower


def _solve(lower: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x with L x = right."""
    found: list[float] = []
    for i, value in enumerate(right):
        found.append((value - sum(lower[i][k] * found[k] for k in range(i))) / lower[i][i])
    return found


def _solve_transposed(lower: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x with L^T x = right."""
    size = len(right)
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (right[i] - sum(lower[k][i] * found[k] for k in range(i + 1, size))) / lower[i][i]
    return found
