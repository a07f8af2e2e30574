"""The figures of all ranks together: the sum over the stages of a pipeline, each of which is profiled where it runs.

A profile sees the operations of its own process. With data parallelism these are all modules on a part of the batch; in
a pipeline they are some modules. In both cases the sum over the ranks is the operations of the whole step.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RankFigures", "RankTotals"]


@dataclass(frozen=True)
class RankFigures:
    """The figures of one rank: operations of the profiled part, seconds, and its number of parameters (unsharded)."""

    flops: int
    macs: int
    backward_flops: int
    recompute_flops: int
    params: int
    seconds: float
    backward_seconds: float

    def row(self) -> list[float]:
        """The figures as a list of numbers for a gather; exact up to 2^53."""
        whole = (self.flops, self.macs, self.backward_flops, self.recompute_flops, self.params)
        return [*map(float, whole), self.seconds, self.backward_seconds]

    @classmethod
    def of_row(cls, row: Sequence[float]) -> RankFigures:
        """The figures from the result of `row`."""
        flops, macs, backward, again, params = map(int, row[:5])
        return cls(flops, macs, backward, again, params, float(row[5]), float(row[6]))


@dataclass(frozen=True)
class RankTotals:
    """All ranks' figures, by rank.

    Attributes:
        ranks: the figures of each rank.
        replicas: how many ranks hold the same part of the model (the data-parallel size).
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
        """The part of `backward_flops` that was a forward done again."""
        return sum(rank.recompute_flops for rank in self.ranks)

    @property
    def params(self) -> int:
        """Parameters of the model; one that two stages share counts in both."""
        return sum(rank.params for rank in self.ranks) // self.replicas
