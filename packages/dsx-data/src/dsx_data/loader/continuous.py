"""An order without smaller last batches: the epochs' orders, one after the other, cut into complete global batches.

An epoch's samples seldom fill all of its global batches. In the other orders the last batch of an epoch is smaller, or
filled with samples that are used twice, depending on the number of ranks. Here the remaining samples begin the first
batch of the next epoch. So the samples of update k are numbers kB to (k+1)B of one endless sequence, for any number of
ranks and any micro-batch size, and no sample is left out or used twice within its epoch's order. Elastic runs need
this.

    epoch 0: 10 samples, B = 4       0..3  4..7  8 9 | 0 1      the loop of epoch 0 ends here, after three batches
    epoch 1                          2..5  6..9                 that of epoch 1 after two

The state has the form of that of `ShardedSampler`'s order (epoch, position in it), so each can load the other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from .order import KEYED_ABOVE, epoch_pieces
from .tracks import BatchSize, load_order, position_state

__all__ = ["ContinuousSampler", "ContinuousTrack"]


class ContinuousSampler(Sampler[int]):
    """Yields this rank's sample indices from `first` on, up to the first batch end at or behind the end of the epoch.

    Args:
        length: number of samples in the dataset, at least 1.
        rank, world_size: this rank and the number of data-parallel ranks.
        micro_batch_size: samples per rank and micro-batch.
        global_batch: samples of all ranks in one update; a multiple of a micro-batch of all ranks.
        shuffle, seed: as for `ShardedSampler`.
    """

    def __init__(
        self,
        length: int,
        *,
        rank: int,
        world_size: int,
        micro_batch_size: int,
        global_batch: int,
        shuffle: bool,
        seed: int,
    ) -> None:
        self.length, self.rank, self.world_size = length, rank, world_size
        self.stride, self.global_batch = micro_batch_size * world_size, global_batch
        self.shuffle, self.seed = shuffle, seed
        self.keyed = length > KEYED_ABOVE
        self.first = 0  # position in the endless sequence at which the next loop begins

    def first_of(self, epoch: int) -> int:
        """The position at which the loop of an epoch begins: the first batch start at or behind its order's start."""
        return _round_up(epoch * self.length, self.global_batch)

    @property
    def stop(self) -> int:
        """The position at which the loop from `first` ends, always behind `first`. Ranks get equally many batches."""
        end = self.first_of(self.first // self.length + 1)
        return self.first + _round_up(end - self.first, self.stride)

    def __iter__(self) -> Iterator[int]:
        place, stop = self.first, self.stop
        while place < stop:
            epoch, offset = divmod(place, self.length)
            upto = min(stop, (epoch + 1) * self.length)
            turn = (self.rank - (place - self.first)) % self.world_size
            places = range(offset + turn, upto - epoch * self.length, self.world_size)
            order = {"seed": self.seed, "epoch": epoch, "shuffle": self.shuffle, "keyed": self.keyed}
            for piece in epoch_pieces([places], self.length, **order):
                yield from piece
            place = upto

    def __len__(self) -> int:
        return (self.stop - self.first) // self.world_size


class ContinuousTrack:
    """Over a `ContinuousSampler`: the position is one in the endless sequence."""

    to_skip = 0
    size = BatchSize(0)
    empty_means_next = False

    def __init__(self, sampler: ContinuousSampler) -> None:
        self._sampler = sampler
        self._used = self.epoch = 0
        self._under_way = False

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop that of `epoch`."""
        self._go_to(self._sampler.first_of(epoch))

    def _go_to(self, place: int) -> None:
        self._under_way = False
        self._sampler.first = self._used = place
        self.epoch = place // self._sampler.length

    def begin(self) -> None:
        """Note that a loop begins. If the loop before was left early, its epoch is over."""
        if self._under_way:
            self.set_epoch(self.epoch + 1)
        self._under_way = True

    def advance(self) -> None:
        """Note that a micro-batch of each rank is handed out."""
        self.size = BatchSize(self._sampler.stride)
        self._used += self._sampler.stride

    def finish(self) -> None:
        """Note that the loop has ended: the next one continues at its end."""
        self._go_to(self._used)

    def key(self, index: int, count: int) -> tuple[int, ...]:
        """The seed, the epoch whose order the sample is from, and the sample's number."""
        sampler = self._sampler
        place = sampler.first + sampler.rank + count * sampler.world_size
        return sampler.seed, place // sampler.length, index

    def state_dict(self) -> dict[str, Any]:
        """The seed, the epoch, and the position in the epoch's order in global samples."""
        sampler = self._sampler
        epoch, position = divmod(self._used, sampler.length)
        return position_state(sampler, epoch, position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises `DataStateError` for the state of another kind of order."""
        load_order(self._sampler, state)
        self._go_to(int(state["epoch"]) * self._sampler.length + int(state["position"]))


def _round_up(number: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `number`."""
    return -(-number // unit) * unit
