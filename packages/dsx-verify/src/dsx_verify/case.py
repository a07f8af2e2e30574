"""Facts about a difference: values that each rank saw in the update, those that plain torch computes, and fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dsx_core.together import some_ranks

from .expected import Computed, Expected, Reference
from .receipt import Fault
from .report import Difference
from .seen import Seen

__all__ = ["Case", "Observed", "fit", "flat", "near", "ratio"]

_MOST = 20_000  # elements of a tensor that take part in a fit


@dataclass
class Observed:
    """The values that this rank saw in one update of the system.

    Attributes:
        unclipped, gradients: whole gradients before clipping (where the system tells), and those that were used.
        rates: learning rates at the update.
        updates: how often the optimizer stepped.
        clips: how often torch's functions clipped.
        losses: what the step returned: one loss a micro-batch, or their mean.
        passes: the forward passes.
    """

    unclipped: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    updates: int = 0
    clips: int = 0
    losses: list[float] = field(default_factory=list)
    passes: list[Seen] = field(default_factory=list)
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    after: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    scale: float = 1.0
    scaler: dict[str, float] = field(default_factory=dict)


@dataclass
class Case:
    """All that rank 0 knows about a difference.

    Attributes:
        count: data-parallel ranks; indices: the one of each rank.
        observed: what each rank saw.
        found: what differs, on all ranks.
        kept: the oracle from before the update, where there was one.
        previous: the parameters from before the previous update.
    """

    expected: Expected
    count: int
    indices: list[int]
    observed: list[Observed]
    reference: Reference | None
    computed: Computed | None
    found: list[Difference]
    kept: Any = None
    previous: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def lead(self) -> Difference:
        """The first difference, on the rank where it is largest."""
        first = self.found[0]
        return max((d for d in self.found if (d.kind, d.name) == (first.kind, first.name)), key=lambda d: d.error)

    @property
    def names(self) -> list[str]:
        """The names of all tensors that differ, in order."""
        return list(dict.fromkeys(d.name for d in self.found))

    def fault(self, kind: str, *evidence: str) -> Fault:
        """The fault, with the first difference as its first line."""
        lead = self.lead
        ranks = sorted({d.rank for d in self.found if d.name == lead.name})
        where = (
            f"{len(self.names)} of {self._compared()} values of this kind differ; this one on rank {some_ranks(ranks)}"
        )
        return Fault(kind, lead.name, lead.step, lead.rank, (str(lead), where, *evidence)[:5])

    def _compared(self) -> str:
        if self.computed is not None and self.lead.kind in ("gradient", "clipped gradient"):
            return str(len(self.computed.parts[0]))
        return "the"


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors as one vector in float64, each with at most some thousands of its elements."""
    return torch.cat([t.detach().double().reshape(-1)[:: max(1, t.numel() // _MOST)] for t in tensors])


def ratio(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """(factor, error): `got` is about `factor * expected`; the error is relative to the size of `got`."""
    size, norm = float(expected.dot(expected)), float(got.norm())
    factor = float(got.dot(expected)) / size if size else 0.0
    return factor, float((got - factor * expected).norm()) / norm if norm else 0.0


def fit(got: torch.Tensor, columns: torch.Tensor) -> tuple[list[float], float]:
    """(weights, error): `got` as a sum of columns."""
    sizes = columns.norm(dim=0).clamp_min(1e-300)
    weights = torch.linalg.lstsq(columns / sizes, got[:, None], driver="gelsd").solution[:, 0] / sizes
    norm = float(got.norm())
    return weights.tolist(), float((got - columns @ weights).norm()) / norm if norm else 0.0


def near(a: float, b: float, tolerance: float) -> bool:
    """Whether two factors are equal within half a percent, or the tolerance where that is more."""
    return abs(a - b) <= max(5e-3, tolerance) * max(abs(a), abs(b)) if b else abs(a) < tolerance
