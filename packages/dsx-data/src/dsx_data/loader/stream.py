"""Iterable datasets that every rank reads alike, shared out so that a run resumes at any number of ranks.

torch leaves it to an iterable dataset to give each rank and each worker process something else. `SharedStream` turns
this round: every reader sees the same stream, and takes its share of each global micro-batch by counting. So the
samples of each global batch are those of the stream in order, whatever the number of ranks and workers, and a position
in the stream is one number. The price: every reader produces, or skips, every sample. Where the dataset has a method
`skip(n)`, as those of Hugging Face `datasets` have, a resumed run skips with it. A dataset that shares itself out among
worker processes is read as if there were none; one that shares itself out among ranks must not be wrapped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as worker_module

from ..errors import DataArgumentError
from ..randomness import generator
from .order import rank_share
from .seeding import Draw, kept_random_states, seed_generators

__all__ = ["SharedStream", "StreamReader", "StreamShare"]


class SharedStream:
    """Says of an iterable dataset that it yields the same samples in the same order to whoever iterates over it.

    Args:
        dataset: any iterable that can be iterated over again. If it has `set_epoch(epoch)`, that is called first.
        shuffle_window: shuffle within consecutive windows of so many samples, another order each epoch; 0: keep the
            order. A window is held in memory, and a resumed run reads its window again from the start.

    Raises:
        DataArgumentError: the window is negative, or the dataset cannot be iterated over.
    """

    def __init__(self, dataset: Iterable[Any], *, shuffle_window: int = 0) -> None:
        if shuffle_window < 0:
            raise DataArgumentError(f"SharedStream(shuffle_window=...): got {shuffle_window}, expected 0 or more")
        if not hasattr(dataset, "__iter__"):
            raise DataArgumentError(f"SharedStream: got {type(dataset).__name__}, expected an iterable dataset")
        self.dataset, self.shuffle_window = dataset, shuffle_window

    def read(self, *, seed: int, epoch: int, position: int, seeded: bool = False) -> Iterator[Any]:
        """The samples of an epoch from `position` on. `seeded`: the random generators are seeded for each sample."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        key = (seed, epoch) if seeded else None
        if not self.shuffle_window:
            yield from self._skipped(position, key)
            return
        block = position // self.shuffle_window
        left_over = position - block * self.shuffle_window
        source = self._skipped(block * self.shuffle_window, key)
        while window := list(itertools.islice(source, self.shuffle_window)):
            order = torch.randperm(len(window), generator=generator(seed, epoch, block)).tolist()
            yield from (window[i] for i in order[left_over:])
            block, left_over = block + 1, 0

    def _skipped(self, count: int, key: tuple[int, int] | None) -> Iterator[Any]:
        """The samples after the first `count`, in the dataset's order."""
        skips = bool(count) and hasattr(self.dataset, "skip")
        source = iter(self.dataset.skip(count) if skips else self.dataset)  # type: ignore[attr-defined]
        for number in itertools.count(count if skips else 0):
            if key is not None:
                seed_generators(*key, number)
            try:
                sample = next(source)
            except StopIteration:
                return
            if number >= count:
                yield sample


@dataclass(frozen=True)
class StreamShare:
    """Which part of each global micro-batch of a stream a rank takes."""

    rank: int
    world_size: int
    micro_batch_size: int
    drop_last: bool


class StreamReader(IterableDataset):
    """One rank's samples of a `SharedStream`; of a worker process, those of its micro-batches."""

    def __init__(self, stream: SharedStream, share: StreamShare, *, seeded: bool = True) -> None:
        self.stream, self.share, self._is_seeded = stream, share, seeded
        self.seed = self.epoch = self.position = 0

    def __iter__(self) -> Iterator[Any]:
        share, worker = self.share, get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        source = self.stream.read(seed=self.seed, epoch=self.epoch, position=self.position, seeded=self._is_seeded)
        size = share.micro_batch_size * share.world_size
        index = 0
        while group := _read_as_one(source, size):
            # torch asks its workers in turn, so worker k of K makes micro-batches k, k + K, ... An incomplete group is
            # the last one: ranks take equally many of it, or none with drop_last.
            if index % workers == number and (len(group) == size or not share.drop_last):
                mine = rank_share(group, rank=share.rank, world_size=share.world_size, drop_last=share.drop_last)
                place = (self.seed, self.epoch, self.position + index * size, share.rank)
                yield from (Draw(sample, place) for sample in mine) if self._is_seeded else mine
            index += 1


def _read_as_one(source: Iterator[Any], count: int) -> list[Any]:
    """The next `count` samples, read as if this process were no worker of a loader.

    A dataset that asks `get_worker_info()` (those of Hugging Face do) would yield only this worker's part.
    """
    known = worker_module._worker_info
    with kept_random_states():
        worker_module._worker_info = None
        try:
            return list(itertools.islice(source, count))
        finally:
            worker_module._worker_info = known
