"""U V^T of a matrix's singular value decomposition, by Newton-Schulz steps: the arithmetic behind Muon.

A step replaces X by a X + (b A + c A^2) X with A = X X^T, an odd quintic polynomial of X's singular values. With the
usual coefficients (3.4445, -4.7750, 2.0315) five steps bring them between 0.7 and 1.2 (Jordan et al., 2024: "Muon: an
optimizer for hidden layers"). Other coefficients, also other ones in each step (Amsel et al., 2025: "The Polar
Express"), are a setting.

Two methods give the same up to rounding:

* `standard` works on X (m x n, m <= n): 4 m^2 n + 2 m^3 operations per step.
* `gram` works on A (m x m) and multiplies X at the end: with P = a I + b A + c A^2 a step is A = P A P, Q = P Q, and
  X = Q X. That is less where n is much larger than m. Rounding grows with the steps that A makes without X, so that A
  is computed again from X after every second step.

No batches of matrices: a library may compute a matrix with other bits in a batch than alone, and the matrices that a
rank holds depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import TensorError

__all__ = ["COEFFICIENTS", "Coefficients", "Method", "coefficients_of_steps", "newton_schulz", "newton_schulz_work"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Jordan et al."""
Coefficients = Sequence[float] | Sequence[Sequence[float]]
"""(a, b, c), or one such triple for each step; where there are fewer than steps, the last one is repeated."""
Method = Literal["standard", "gram"]

_RESTART = 2
"""Steps on A alone before it is computed again from X."""


def coefficients_of_steps(coefficients: Coefficients, steps: int) -> list[tuple[float, float, float]]:
    """The triple of each step.

    Raises:
        ValueError: these are not triples of numbers.
    """
    given: Any = coefficients
    several = len(given) > 0 and not isinstance(given[0], (int, float))
    triples: list[Any] = [tuple(map(float, triple)) for triple in (given if several else (given,))]
    if not triples or any(len(triple) != 3 for triple in triples):
        raise ValueError("expected (a, b, c), or one such triple for each step")
    return [triples[min(step, len(triples) - 1)] for step in range(steps)]


def newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    dtype: torch.dtype | None = None,
    *,
    coefficients: Coefficients = COEFFICIENTS,
    eps: float = 1e-7,
    method: Method = "standard",
) -> Tensor:
    """U V^T of one matrix, approximately.

    Args:
        matrix: (rows, columns), of any dtype. It is not changed.
        steps: of the iteration.
        dtype: it computes in this; None: bfloat16 on CUDA, else float32.
        coefficients: of the polynomial.
        eps: least norm that the matrix is divided by.
        method: see the module's text.

    Returns:
        A new tensor (rows, columns) in the dtype it was computed in. With `standard` in bfloat16 it has the bits of
        `torch.optim.Muon`.

    Raises:
        TensorError: it is not a matrix.
    """
    if matrix.dim() != 2:
        raise TensorError(f"newton_schulz: got shape {tuple(matrix.shape)}, expected (rows, columns)")
    x = matrix.to(dtype or (torch.bfloat16 if matrix.is_cuda else torch.float32))
    tall = matrix.shape[0] > matrix.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=eps)
    triples = coefficients_of_steps(coefficients, steps)
    if method == "gram":
        for start in range(0, steps, _RESTART):
            x = _by_gram(x, triples[start : start + _RESTART])
    else:
        for a, b, c in triples:
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _by_gram(x: Tensor, triples: Sequence[tuple[float, float, float]]) -> Tensor:
    """Some steps of which only the first and the last look at the whole matrix."""
    gram, product = x @ x.T, None
    for number, (a, b, c) in enumerate(triples):
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        product = factor if product is None else factor @ product
        if number + 1 < len(triples):
            gram = factor @ gram @ factor
    return x if product is None else product @ x


def newton_schulz_work(rows: int, columns: int, steps: int, method: Method = "standard") -> float:
    """Floating-point operations of `newton_schulz` (a multiplication and an addition are two)."""
    m, n = float(min(rows, columns)), float(max(rows, columns))
    if method == "standard":
        return steps * (4 * m * m * n + 2 * m**3)
    restarts = -(-steps // _RESTART)
    return restarts * 4 * m * m * n + (steps + 3 * (steps - restarts)) * 2 * m**3
