"""Second groups of ranks, in addition to the one that shares a buffer: copies (hybrid sharding, MiCS) and near ranks
(hpZ)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dsx_comm import RankSet

from ..errors import ZeroConfigError
from .units import ParameterInfo, RanksOf

__all__ = ["SecondaryRanks"]

_TakePart = Callable[[RankSet, Sequence[int], str], RankSet]


class SecondaryRanks:
    """Chooses rank sets as `choose` does, and adds further groups to them.

    Experts' parameters, which only some data-parallel ranks hold, keep their sets.

    Args:
        choose: who holds a parameter.
        take_part: makes a group of some ranks of a set (`AuxiliaryGroups.take_part`).
        shard_size: this many neighbouring ranks share a buffer, and the others hold copies of it; 0: all share it.
        near_size: this many neighbouring ranks have secondary shards of a gathered buffer; 0: none have.
        setting: what to call `shard_size` in errors.
    """

    def __init__(
        self,
        choose: RanksOf,
        take_part: _TakePart,
        *,
        shard_size: int = 0,
        near_size: int = 0,
        setting: str = "zero_optimization.mics_shard_size",
    ) -> None:
        self._choose, self._take_part = choose, take_part
        self._shard_size, self._near_size, self._setting = shard_size, near_size, setting
        self._known: dict[RankSet, RankSet] = {}

    def __call__(self, info: ParameterInfo) -> RankSet:
        """The rank set of a parameter (collective for the first parameter of each set)."""
        ranks = self._choose(info)
        found = self._known.get(ranks)
        if found is None:
            found = self._known[ranks] = self._divided(ranks)
        return found

    def _divided(self, ranks: RankSet) -> RankSet:
        if ranks.kind == "experts" or ranks.size == 1:
            return ranks
        if self._shard_size:
            return self._hybrid(ranks, self._shard_size)
        if self._near_size:
            size = self._near_size
            _check_divides(ranks, size, "zero_optimization.zero_hpz_partition_size")
            first = ranks.rank - ranks.rank % size
            return replace(ranks, near=self._take_part(ranks, range(first, first + size), f"near {size}"))
        return ranks

    def _hybrid(self, ranks: RankSet, size: int) -> RankSet:
        _check_divides(ranks, size, self._setting)
        if size == ranks.size:
            return ranks
        copy, place = divmod(ranks.rank, size)
        shard = self._take_part(ranks, range(copy * size, (copy + 1) * size), f"shards of {size}")
        copies = self._take_part(ranks, range(place, ranks.size, size), f"copies of shards of {size}")
        return replace(
            ranks,
            group=shard.group,
            rank=place,
            size=size,
            divisor=ranks.divisor,
            counts_in_norm=ranks.counts_in_norm and copy == 0,
            copies=copies,
            whole=ranks.group,
        )


def _check_divides(ranks: RankSet, size: int, setting: str) -> None:
    if size < 2 or ranks.size % size:
        raise ZeroConfigError(
            setting, f"got {size}, expected a divisor of the {ranks.size} data-parallel ranks, at least 2"
        )
