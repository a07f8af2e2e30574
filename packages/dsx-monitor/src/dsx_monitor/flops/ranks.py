"""The figures of all ranks together: what the stages of a pipeline, each profiled where it runs, add up to.

No torch in here.

A profile sees the operations of its own process. Under data parallelism that is the whole model on a part of the
batch; in a pipeline it is a part of the model. Added up over the ranks, both are the operations of the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RankFigures", "RankTotals"]


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured. Operations of the profiled part, seconds, and the parameters it holds (whole ones)."""

    flops: int
    macs: int
    backward_flops: int
    recompute_flops: int
    params: int
    seconds: float
    backward_seconds: float

    def row(self) -> list[float]:
        """As numbers, to be gathered; exact up to 2^53."""
        whole = (self.flops, self.macs, self.backward_flops, self.recompute_flops, self.params)
        return [*map(float, whole), self.seconds, self.backward_seconds]

    @classmethod
    def of_row(cls, row: Sequence[float]) -> RankFigures:
        """From `row`."""
        flops, macs, backward, again, params = map(int, row[:5])
        return cls(flops, macs, backward, again, params, float(row[5]), float(row[6]))


@dataclass(frozen=True)
class RankTotals:
    """All ranks' figures, by rank.

    Attributes:
        ranks: what each measured.
        replicas: ranks that hold the same part of the model (the data-parallel size).
    """

    ranks: tuple[RankFigures, ...]
    replicas: int = 1

    @property
    def flops(self) -> int:
        """Forward operations of the whole step."""
        return sum(rank.flops for rank in self.ranks)

    @property
    def macs(self) -> int:
        """Forward multiply-accumulates of the whole step."""
        return sum(rank.macs for rank in self.ranks)

    @property
    def backward_flops(self) -> int:
        """Backward operations of the whole step, recomputation included."""
        return sum(rank.backward_flops for rank in self.ranks)

    @property
    def recompute_flops(self) -> int:
        """What of `backward_flops` was a forward done again."""
        return sum(rank.recompute_flops for rank in self.ranks)

    @property
    def params(self) -> int:
        """Parameters of the model; one that two stages share counts in both."""
        return sum(rank.params for rank in self.ranks) // self.replicas
