"""Weights that several stages share.

Each rank that uses a shared weight holds a copy. The copies start equal (the lowest rank's values are sent to the
others) and stay equal, because each step sums their gradients over the ranks before the optimizer uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dsx_comm
import torch
from torch import nn


@dataclass(frozen=True)
class Tie:
    """One shared weight on this rank.

    Attributes:
        key: name of what is shared.
        name: name of the parameter on this rank.
        parameter: this rank's copy.
        group: process group of the ranks that hold a copy.
        ranks: global ranks of this group; only the copy of the first one counts in norms and checkpoints.
    """

    key: str
    name: str
    parameter: nn.Parameter
    group: Any
    ranks: tuple[int, ...]

    @property
    def owned(self) -> bool:
        """True on the rank whose copy counts in norms and checkpoints."""
        return dsx_comm.get_rank() == self.ranks[0]


class Ties:
    """All shared weights of one rank, in an order that all ranks agree on."""

    def __init__(self, ties: Sequence[Tie]) -> None:
        self.ties = tuple(ties)

    def __bool__(self) -> bool:
        return bool(self.ties)

    def synchronize(self) -> None:
        """Set every copy to the values of the first rank's copy (collective)."""
        for tie in self.ties:
            with torch.no_grad():
                value = tie.parameter.detach().contiguous()
                dsx_comm.broadcast(value, src=tie.ranks[0], group=tie.group)
                tie.parameter.copy_(value)

    def reduce_gradients(self) -> None:
        """Sum the gradients of all copies; a copy without a gradient counts as zeros (collective over the copies)."""
        for tie in self.ties:
            gradient = tie.parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(tie.parameter)
            gradient = gradient.contiguous()
            dsx_comm.all_reduce(gradient, group=tie.group)
            tie.parameter.grad = gradient


def make_groups(holders: dict[str, list[list[int]]]) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Make the groups of ranks that share each weight. Every rank of the world calls it with the same argument.

    Args:
        holders: for every key, one list of global ranks per pipeline (copy of the model).

    Returns:
        For every key that this rank shares with others: the group and its ranks.
    """
    me = dsx_comm.get_rank()
    made: dict[tuple[int, ...], Any] = {}
    found = {}
    for key in sorted(holders):
        for ranks in map(tuple, holders[key]):
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = dsx_comm.new_group(list(ranks), description="tied weights")
            if len(ranks) > 1 and me in ranks:
                found[key] = (made[ranks], ranks)
    return found
