"""`ignore_unused_parameters: false`: a trainable parameter that got no gradient since the last step is an error, on
every rank.

By default a parameter without a gradient counts as zeros. The setting is for finding a branch of the model that was
forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import dsx_comm
import torch
from dsx_core.errors import first_few
from dsx_core.together import some_ranks

from ..errors import ZeroStateError
from ..params.flat import Unit

__all__ = ["UnusedParameters"]

_MAX_NAMED = 8


class UnusedParameters:
    """Finds trainable parameters that got no gradient.

    Args:
        units: the units of the model.
        ranks: the ranks that compare.
    """

    def __init__(self, units: Iterable[Unit], ranks: dsx_comm.RankSet) -> None:
        self._ranks = ranks
        groups = [group for unit in units for group in unit.trainable]
        pairs = [(n, p) for group in groups for n, p in zip(group.layout.names, group.parameters)]
        self._names = [name for name, _ in pairs]
        # The ranks that hold a parameter, if only some do (experts). Tokens need not reach each of these ranks.
        self._holders = {
            name: dsx_comm.get_all_ranks_from_group(group.ranks.holders)
            for group in groups
            if group.ranks.holders is not ranks.group
            for name in group.layout.names
        }
        self._seen = torch.zeros(len(pairs), dtype=torch.uint8, device="cpu")
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, index))
            for index, (_, parameter) in enumerate(pairs)
        ]

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        self._seen[index] = 1

    def check(self) -> None:
        """Check the gradients since the last call on all ranks (collective), and begin a new count.

        Raises:
            ZeroStateError: on every rank, with the names of the parameters and ranks. Nothing has been changed.
        """
        mine, self._seen = self._seen, torch.zeros_like(self._seen)
        complete: list[Any] = [bool(mine.all())] * self._ranks.size
        if self._ranks.size > 1:  # whose gradients are missing is asked only where some are
            dsx_comm.all_gather_object(complete, complete[0], group=self._ranks.group)
        if all(complete):
            return
        by_rank = self._seen_by_rank(bytes(mine.tolist()))
        missing = [
            f"{name} (rank {some_ranks(ranks)})"
            for index, name in enumerate(self._names)
            if (ranks := _missing(by_rank, index, name))
        ]
        if missing:
            told = first_few(missing, _MAX_NAMED, between="; ")
            raise ZeroStateError(
                f"no gradient since the last step for {told}. Use them in the loss,"
                " freeze them (requires_grad=False), or let them count as zeros (ignore_unused_parameters: true)"
            )

    def _seen_by_rank(self, mine: bytes) -> list[tuple[bytes, dict[str, Any]]]:
        """For each rank, which parameters got a gradient, and who holds those that only some ranks hold. Where all
        ranks hold the same, one rank of each of a few kinds tells it, and others count as the first kind.
        """
        by_rank: list[Any] = [(mine, self._holders)] * self._ranks.size
        if self._ranks.size == 1:
            return by_rank
        if self._holders:
            dsx_comm.all_gather_object(by_rank, by_rank[0], group=self._ranks.group)
            return by_rank
        return [(seen or b"", {}) for seen in dsx_comm.together(self._ranks.group).by_rank(mine)]

    def remove_hooks(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()


def _missing(by_rank: list[Any], index: int, name: str) -> list[int]:
    """The ranks without a gradient of a parameter. The holders of an expert count only if none of them has one."""
    without = [rank for rank, (seen, _) in enumerate(by_rank) if not seen[index]]
    if name not in by_rank[0][1]:
        return without
    reached = {str(holders[name]) for seen, holders in by_rank if seen[index]}
    return [rank for rank in without if str(by_rank[rank][1][name]) not in reached]
