"""Order of the samples of one epoch, and each rank's share of it.

The order is a function of (seed, epoch) alone, and a position in it is counted in *global* samples. Ranks take turns:
of the samples of one global micro-batch, rank r of W takes number r, r + W, r + 2W, ... So the set of samples in each
global batch does not depend on the number of ranks, and a run that stopped at a position resumes there with any
number of ranks. Each epoch has its own order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

__all__ = ["ShardedSampler", "epoch_order", "rank_share"]


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The order in which all ranks together use the samples of one epoch: int64 [length], numbers 0 to `length` - 1.

    With `shuffle` it is a permutation drawn from `seed` + `epoch`, the same on all ranks; else it is ascending.
    """
    if not shuffle:
        return np.arange(length)
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator).numpy()


def rank_share(order: Any, *, rank: int, world_size: int, drop_last: bool) -> Any:
    """The part of `order` that one rank takes: every `world_size`-th sample, equally many on each rank.

    The last samples, which do not divide among the ranks, are dropped (`drop_last`), or filled up with samples from
    the start of `order`, repeatedly if there are fewer samples than ranks. The result has the type of `order`: an
    array, or a list.
    """
    if drop_last:
        return order[: len(order) // world_size * world_size][rank::world_size]
    mine = order[rank::world_size]
    rounds = -(-len(order) // world_size)
    if len(order) and len(mine) < rounds:  # in the last round this rank gets a sample from the start
        filler = (rank - len(order) % world_size) % len(order)
        one = order[filler : filler + 1]
        mine = np.concatenate([mine, one]) if isinstance(order, np.ndarray) else mine + one
    return mine


class ShardedSampler(Sampler[int]):
    """Yields this rank's sample indices of the current epoch, from the current position on.

    Args:
        length: number of samples in the dataset.
        rank, world_size: this rank and the number of data-parallel ranks.
        shuffle: use a new permutation in each epoch; else the order of the dataset.
        seed: decides, with the epoch, the permutation; it must be the same on all ranks.
        drop_last: drop the last samples that do not divide among the ranks, instead of repeating samples.
    """

    def __init__(
        self, length: int, *, rank: int, world_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        self.length, self.rank, self.world_size = length, rank, world_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.position = 0  # global samples of this epoch that are already used

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` from its first sample."""
        self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(self.length, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        # A copy, because a view would keep the memory of the complete order.
        share = rank_share(order[self.position :], rank=self.rank, world_size=self.world_size, drop_last=self.drop_last)
        mine = np.array(share)
        del order, share
        for first in range(0, len(mine), 65536):  # a list of all of them would need ten times the memory of the array
            yield from mine[first : first + 65536].tolist()

    def __len__(self) -> int:
        remaining = self.length - self.position
        return remaining // self.world_size if self.drop_last else -(-remaining // self.world_size)
