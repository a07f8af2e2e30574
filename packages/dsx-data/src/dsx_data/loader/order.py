"""Order of the samples of one epoch, and each rank's share of it.

The order is a function of (seed, epoch) alone, and a position in it is counted in *global* samples. Ranks take turns:
of the samples of one global micro-batch, rank r of W takes number r, r + W, r + 2W, ... So the set of samples in each
global batch does not depend on the number of ranks, and a run that stopped at a position resumes there with any
number of ranks. Each epoch has its own order.

Up to `KEYED_ABOVE` samples the order is an array. Above, it is computed piece by piece (`KeyedPermutation`), so that
its memory does not grow with the data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from .permutation import KeyedPermutation

__all__ = ["KEYED_ABOVE", "ShardedSampler", "epoch_order", "epoch_pieces", "rank_share"]

KEYED_ABOVE = 1 << 24
"""Data sets with more samples are shuffled by a keyed permutation instead of an array (128 MiB at this length)."""

_PIECE = 65536  # samples of one rank that are computed, or converted to Python integers, at a time


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The order in which all ranks together use the samples of one epoch: int64 [length], numbers 0 to `length` - 1.

    With `shuffle` it is a permutation, the same on all ranks: drawn from `seed` + `epoch` up to `KEYED_ABOVE` samples,
    and from both numbers above; else it is ascending. It takes 8 bytes per sample: samplers use `epoch_pieces`.
    """
    if shuffle and length > KEYED_ABOVE:
        return KeyedPermutation(length, seed, epoch)(np.arange(length))
    return _drawn(length, seed, epoch) if shuffle else np.arange(length)


def epoch_pieces(
    places: Iterable[range], length: int, *, seed: int, epoch: int, shuffle: bool, keyed: bool | None = None
) -> Iterator[list[int]]:
    """The samples at `places` of an epoch's order, a piece at a time.

    Args:
        places: places in the order, each range ascending.
        length, seed, epoch, shuffle: as for `epoch_order`.
        keyed: whether the permutation is computed instead of held in memory; None: above `KEYED_ABOVE` samples.
    """
    if shuffle and not (length > KEYED_ABOVE if keyed is None else keyed):
        order = _drawn(length, seed, epoch)
        # Copies, because views would keep the memory of the complete order.
        parts = [order[one.start : one.stop : one.step].copy() for one in places]
        del order
        # A list of a complete part would need ten times the memory of the array.
        yield from (part[first : first + _PIECE].tolist() for part in parts for first in range(0, len(part), _PIECE))
        return
    at = KeyedPermutation(length, seed, epoch) if shuffle and length else None
    for one in places:
        for first in range(0, len(one), _PIECE):
            piece = one[first : first + _PIECE]
            yield list(piece) if at is None else at(np.arange(piece.start, piece.stop, piece.step)).tolist()


def _drawn(length: int, seed: int, epoch: int) -> np.ndarray:
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator, device="cpu").numpy()


def rank_share(order: Any, *, rank: int, world_size: int, drop_last: bool) -> Any:
    """The part of `order` that one rank takes: every `world_size`-th sample, equally many on each rank.

    The last samples, which do not divide among the ranks, are dropped (`drop_last`), or filled up with samples from
    the start of `order`, repeatedly if there are fewer samples than ranks. The result has the type of `order`: an
    array, or a list.
    """
    mine, filler = _share_of_places(range(len(order)), rank, world_size, drop_last)
    parts = [order[one.start : one.stop : one.step] for one in (mine, filler)]
    if not filler:
        return parts[0]
    return np.concatenate(parts) if isinstance(order, np.ndarray) else parts[0] + parts[1]


def _share_of_places(places: range, rank: int, world_size: int, drop_last: bool) -> tuple[range, range]:
    """The part of `places` that `rank_share` gives a rank: every `world_size`-th one, and a filler or none."""
    count = len(places)
    if drop_last:
        return places[: count // world_size * world_size][rank::world_size], places[:0]
    mine = places[rank::world_size]
    if not count or len(mine) == -(-count // world_size):
        return mine, places[:0]
    first = (rank - count % world_size) % count  # in the last round this rank gets a sample from the start
    return mine, places[first : first + 1]


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
        self.keyed = length > KEYED_ABOVE  # False, too, in a run that began with an order in memory
        self.position = 0  # global samples of this epoch that are already used

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` from its first sample."""
        self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[int]:
        rest = range(self.position, self.length)
        places = _share_of_places(rest, self.rank, self.world_size, self.drop_last)
        order = {"seed": self.seed, "epoch": self.epoch, "shuffle": self.shuffle, "keyed": self.keyed}
        for piece in epoch_pieces(places, self.length, **order):
            yield from piece

    def __len__(self) -> int:
        remaining = self.length - self.position
        return remaining // self.world_size if self.drop_last else -(-remaining // self.world_size)
