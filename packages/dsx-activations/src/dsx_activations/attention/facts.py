"""The arguments of a call of attention over sequence shards, checked before anything is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import dsx_comm
import torch

from ..errors import ActivationArgumentError
from .cutting import ORDERS, Segments, place_in, sequence_segments

__all__ = ["Facts"]

COMPARED = 16
"""The facts of the first calls in a group are compared over its ranks: so many. Later calls that say the length of the
sequence are assumed to agree.
"""

_compared: Counter[tuple[int, ...]] = Counter()


@dataclass(frozen=True)
class Facts:
    """The group, and who has which tokens.

    Attributes:
        group: the process group.
        rank, size: this process' place among the peers, and how many they are.
        segments: the tokens of every peer.
        length: tokens that all peers have together.
        peers: the ranks in `group` that take part.
        group_size: number of ranks in `group`.
    """

    group: Any
    rank: int
    size: int
    segments: tuple[Segments, ...]
    length: int
    peers: tuple[int, ...]
    group_size: int

    @classmethod
    def of(
        cls,
        name: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: Any,
        order: str,
        length: int | None,
        further: Mapping[str, int] | None = None,
    ) -> Facts:
        """Check the arguments of a call. `further` are numbers by name that must be the same on all ranks, too.

        Raises:
            ActivationArgumentError: shapes, dtypes or numbers of heads do not fit, or the ranks differ in them.
        """
        _check_tensors(name, q, k, v)
        rank, size = place_in(group)
        tokens = q.shape[2]
        if order not in ORDERS:
            raise ActivationArgumentError(f"{name}: order: got {order!r}, expected {' or '.join(ORDERS)}")
        whole = tokens * size if length is None else length
        same = {"length": whole, "order": ORDERS.index(order), **(further or {})}
        _compare(name, group, rank, size, (q, k, v), same, always=length is None)
        segments = tuple(sequence_segments(whole, size, one, order) for one in range(size))
        found = cls(group, rank, size, segments, whole, tuple(range(size)), size)
        if found.tokens_of(rank) != tokens:
            raise ActivationArgumentError(
                f"{name}: got {tokens} tokens on rank {rank} of {size}, expected {found.tokens_of(rank)} of a sequence"
                f" of {whole} tokens in {order} order; cut it with shard_sequence, and give length= where it does not"
                " divide"
            )
        return found

    def tokens_of(self, rank: int) -> int:
        """Number of a peer's tokens."""
        return sum(behind - first for first, behind in self.segments[rank])

    def in_teams(self, number: int) -> tuple[Facts, Facts]:
        """Two views of the peers: teams of `number` neighbours, and the peers with the same place in their teams.

        Returns:
            This rank's team, whose whole is the tokens of the team, numbered from 0 in their order; and the other view,
            in which each peer has the tokens of its whole team, numbered as in the sequence.
        """
        team, place = divmod(self.rank, number)
        of_teams = tuple(_merged(self.segments[n * number : (n + 1) * number]) for n in range(self.size // number))
        mine = of_teams[team]
        begin = dict(zip((first for first, _ in mine), accumulate((b - f for f, b in mine), initial=0)))
        members = self.segments[team * number : (team + 1) * number]
        inside = tuple(tuple(_moved(one, mine, begin) for one in segments) for segments in members)
        together = sum(behind - first for first, behind in mine)
        within = replace(
            self, rank=place, size=number, segments=inside, length=together,
            peers=self.peers[team * number : (team + 1) * number],
        )  # fmt: skip
        across = replace(
            self, rank=team, size=self.size // number, segments=of_teams, peers=self.peers[place::number]
        )  # fmt: skip
        return within, across


def _merged(of_ranks: Iterable[Segments]) -> Segments:
    """The tokens of several ranks in their order; ranges that touch become one."""
    found: list[tuple[int, int]] = []
    for first, behind in sorted(one for segments in of_ranks for one in segments if one[1] > one[0]):
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], behind)
        else:
            found.append((first, behind))
    return tuple(found)


def _moved(one: tuple[int, int], wholes: Segments, begin: dict[int, int]) -> tuple[int, int]:
    """A range of tokens, numbered by its place in `wholes`, which follow each other."""
    if one[0] == one[1]:
        return 0, 0
    first = next(first for first, behind in wholes if first <= one[0] < behind)
    return one[0] - first + begin[first], one[1] - first + begin[first]


def _check_tensors(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
    if any(t.dim() != 4 for t in (q, k, v)):
        raise ActivationArgumentError(f"{name}: got shapes {shapes}, expected (batch, heads, tokens, features) of each")
    if q.shape[:1] != k.shape[:1] or q.shape[2:] != k.shape[2:] or k.shape[:3] != v.shape[:3]:
        raise ActivationArgumentError(
            f"{name}: got shapes {shapes}, expected one batch and one number of tokens, as many heads of keys as of"
            " values, and as many features of queries as of keys"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ActivationArgumentError(
            f"{name}: got {q.shape[1]} heads of queries and {k.shape[1]} of keys, expected a multiple"
        )
    if len({(t.dtype, t.device) for t in (q, k, v)}) > 1 or not q.is_floating_point():
        found = ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, v))
        raise ActivationArgumentError(f"{name}: got {found}, expected one floating-point dtype and one device")


def _compare(
    name: str, group: Any, rank: int, size: int, tensors: tuple[torch.Tensor, ...], same: Mapping[str, int], *,
    always: bool,
) -> None:  # fmt: skip
    """Compare a call over the ranks of its group: ranks that differ would wait for each other, or mix tokens."""
    if size == 1:
        return
    key = tuple(dsx_comm.get_all_ranks_from_group(group))
    if _compared[key] >= COMPARED and not always:
        return
    _compared[key] += 1
    heads = [tensors[0].shape[0], *(t.shape[1] for t in tensors[:2]), *(t.shape[3] for t in tensors[1:])]
    mine = torch.tensor([*heads, *same.values(), tensors[0].element_size()], device=tensors[0].device)
    found = mine.new_empty(size * mine.numel())
    dsx_comm.all_gather_into_tensor(found, mine, group=group)
    rows = found.view(size, -1).tolist()
    differing = [one for one in range(size) if rows[one] != rows[rank]]
    if differing:
        names = "batch, heads of queries, heads of keys, features of keys, features of values, "
        names += ", ".join([*same, "bytes"])
        raise ActivationArgumentError(
            f"{name}: the ranks differ in ({names}): rank {rank} has {rows[rank]}, rank {differing[0]} has"
            f" {rows[differing[0]]}; expected the same; pad or cut the sequences alike, and give length= where a"
            " sequence does not divide"
        )
