"""Compares tensors: how much they may differ, and where they differ most.

Errors are measured against the largest magnitude of the tensor, not element by element: an element that is small
because large terms cancelled has the rounding error of the large terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .report import Difference

_ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@dataclass(frozen=True)
class Tolerance:
    """Allowed errors, relative to the largest magnitude of the compared values.

    Attributes:
        loss: for the loss of a micro-batch.
        grad: for a reduced gradient, and for the global norm.
        update: for the change of a parameter in one step.
        param: for a parameter, in addition to the error allowed by `update`.
    """

    loss: float = 1e-5
    grad: float = 1e-4
    update: float = 1e-3
    param: float = 1e-6

    @classmethod
    def for_dtypes(cls, compute: torch.dtype, reduction: torch.dtype) -> Tolerance:
        """Defaults for computation and reduction in these dtypes."""
        rounding = max(_ROUNDING.get(compute, 2.0**-24), _ROUNDING.get(reduction, 2.0**-24))
        return cls(loss=max(1e-5, 8 * rounding), grad=max(1e-4, 8 * rounding))


class Comparison:
    """Collects the differences on this rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.compared: dict[str, int] = {}
        self.worst: dict[str, float] = {}
        self.differences: list[Difference] = []

    def tensors(
        self, step: int, kind: str, name: str, got: torch.Tensor, expected: torch.Tensor, allowed: float
    ) -> None:
        """Compare two tensors of the same shape; `allowed` is absolute. A non-finite value differs from any finite
        one.
        """
        if got.shape != expected.shape:
            self._add(Difference(step, kind, f"{name} (shape)", self._rank, 1.0, 0.0, got.numel(), expected.numel()))
            return
        if got.numel() == 0:
            return
        a, b = got.detach().double().reshape(-1), expected.detach().double().reshape(-1)
        apart = torch.where(a == b, 0.0, (a - b).abs())  # equal infinities are equal
        apart = torch.where(torch.isnan(apart), torch.where(a.isnan() & b.isnan(), 0.0, torch.inf), apart)
        place = int(apart.argmax())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), got.shape)) if got.dim() else ()
        error = float(apart[place])
        self._judge(Difference(step, kind, name, self._rank, error, allowed, float(a[place]), float(b[place]), where))

    def losses(self, step: int, name: str, rank: int, got: float, expected: float, allowed: float) -> None:
        """Compare two losses; `rank` is the rank whose engine computed the first."""
        here, self._rank = self._rank, rank
        self.numbers(step, "loss", name, got, expected, allowed)
        self._rank = here

    def numbers(self, step: int, kind: str, name: str, got: float, expected: float, allowed: float) -> None:
        """Compare two numbers."""
        self.tensors(
            step,
            kind,
            name,
            torch.tensor(got, dtype=torch.float64),
            torch.tensor(expected, dtype=torch.float64),
            allowed,
        )

    def _judge(self, found: Difference) -> None:
        self.compared[found.kind] = self.compared.get(found.kind, 0) + 1
        share = found.error / found.allowed if found.allowed > 0 else (0.0 if found.error == 0 else float("inf"))
        self.worst[found.kind] = max(self.worst.get(found.kind, 0.0), share)
        if share > 1.0:
            self._add(found)

    def _add(self, found: Difference) -> None:
        self.differences.append(found)


def magnitude(tensor: torch.Tensor) -> float:
    """The largest absolute value; 0.0 for an empty tensor."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
