"""Words of a few bytes between the ranks, in host memory: what an `AgreedOrder` agrees over."""

from __future__ import annotations

from typing import Any

import dsx_comm
import torch

__all__ = ["ControlChannel", "OneRank"]


class ControlChannel:
    """The `Channel` of an order over a group for host tensors (the same ranks as the group of the tensors)."""

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        self.rank, self._group, self._world_size = rank, group, world_size

    def exchange(self, words: tuple[int, ...]) -> list[tuple[int, ...]]:
        """See `Channel.exchange`: one all-gather."""
        mine = torch.tensor(words, dtype=torch.int64)
        everybody = torch.empty(self._world_size * len(words), dtype=torch.int64)
        dsx_comm.all_gather_into_tensor(everybody, mine, group=self._group)
        return [tuple(row) for row in everybody.view(self._world_size, -1).tolist()]


class OneRank:
    """The `Channel` of a process that holds the whole model: its order is frozen, and read ahead, by the same rules."""

    rank = 0

    def exchange(self, words: tuple[int, ...]) -> list[tuple[int, ...]]:
        """See `Channel.exchange`: there is nobody else."""
        return [words]
