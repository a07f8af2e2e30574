"""Iterable datasets that every rank reads completely and that are divided so that a run resumes at any number of ranks.

With torch, an iterable dataset itself must give each rank and each worker process different samples. With
`SharedStream` every reader sees the same stream, and takes its share of each global micro-batch by counting. So the
samples of each global batch are those of the stream in order, for any number of ranks and workers, and a position
in the stream is one number. The price: every reader produces, or skips, every sample. If the dataset has a method
`skip(n)`, as those of Hugging Face `datasets` have, a resumed run uses it; a sequence (`collections.abc.Sequence`) is
read by number from the position on. A dataset that divides itself among
worker processes is read as if there were none; one that divides itself among ranks must not be wrapped.

With a number of samples per update (`StreamShare.global_batch`) an epoch ends with a complete update, as in
`continuous`: the samples that remain of its stream begin the first update of the next epoch. The end of a stream is not
known beforehand, and worker processes read ahead; so each micro-batch carries the position where its samples end
(`Placed`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as worker_module

from ..errors import DataArgumentError
from ..randomness import generator
from .order import rank_share
from .seeding import Draw, preserve_random_states, seed_generators

__all__ = ["Placed", "PlacedCollate", "SharedStream", "StreamReader", "StreamShare"]


class SharedStream:
    """Says that an iterable dataset yields the same samples in the same order to every reader.

    Args:
        dataset: any iterable that can be iterated over more than once. If it has `set_epoch(epoch)`, that is called
            first. A resumed run asks it for `skip(n)`, an iterable of the samples after the first n, or reads a
            sequence by number; else it reads all samples before its position and drops them.
        shuffle_window: shuffle within consecutive windows of so many samples, differently in each epoch; 0: keep the
            order. A window is held in memory, and a resumed run reads its window again from the start.

    Raises:
        DataArgumentError: the window is negative, or the dataset cannot be iterated over; while reading: its `skip`
            gives no iterable.
    """

    def __init__(self, dataset: Iterable[Any], *, shuffle_window: int = 0) -> None:
        if shuffle_window < 0:
            raise DataArgumentError(f"SharedStream(shuffle_window=...): got {shuffle_window}, expected 0 or more")
        if not hasattr(dataset, "__iter__"):
            raise DataArgumentError(f"SharedStream: got {type(dataset).__name__}, expected an iterable dataset")
        self.dataset, self.shuffle_window = dataset, shuffle_window

    def read(self, *, seed: int, epoch: int, position: int, seeded: bool = False) -> Iterator[Any]:
        """The samples of an epoch from `position` on.

        Args:
            seed: of the shuffling, and of the generators.
            position: number of the first sample that is yielded.
            seeded: whether the random generators are seeded for each sample.
        """
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
            order = torch.randperm(len(window), generator=generator(seed, epoch, block), device="cpu").tolist()
            yield from (window[i] for i in order[left_over:])
            block, left_over = block + 1, 0

    def _skipped(self, count: int, key: tuple[int, int] | None) -> Iterator[Any]:
        """The samples after the first `count`, in the dataset's order."""
        first, source = self._from(count)
        for number in itertools.count(first):
            if key is not None:
                seed_generators(*key, number)
            try:
                sample = next(source)
            except StopIteration:
                return
            if number >= count:
                yield sample

    def _from(self, count: int) -> tuple[int, Iterator[Any]]:
        """The dataset from number `count` on if it can begin there, else from 0; the number, and the samples."""
        if count and hasattr(self.dataset, "skip"):
            rest = self.dataset.skip(count)  # type: ignore[attr-defined]
            if not hasattr(rest, "__iter__"):
                raise DataArgumentError(
                    f"SharedStream: got {type(rest).__name__} from {type(self.dataset).__name__}.skip({count}),"
                    f" expected an iterable of the samples after the first {count}"
                )
            return count, iter(rest)
        if count and isinstance(self.dataset, Sequence):
            sequence = self.dataset
            return count, (sequence[number] for number in range(count, len(sequence)))
        return 0, iter(self.dataset)


@dataclass(frozen=True)
class StreamShare:
    """The part of each global micro-batch of a stream that a rank takes.

    Attributes:
        rank, world_size: this rank and the number of data-parallel ranks.
        micro_batch_size: samples per rank and micro-batch.
        drop_last: drop the last global micro-batch of a stream if it is not complete.
        global_batch: samples of all ranks in one update, a multiple of a global micro-batch; None: an epoch ends with
            its stream, and its last micro-batch may be smaller.
    """

    rank: int
    world_size: int
    micro_batch_size: int
    drop_last: bool
    global_batch: int | None = None


class Placed(NamedTuple):
    """A sample, or a batch of samples, and the position where its global micro-batch ends.

    Attributes:
        what: the sample or the batch.
        epoch, position: epoch and position of the first sample after the global micro-batch.
    """

    what: Any
    epoch: int
    position: int


class PlacedCollate:
    """A collate function for `Placed` samples. The batch has the epoch and position of its samples."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, samples: list[Placed]) -> Placed:
        """Collate one batch."""
        return Placed(self._collate([one.what for one in samples]), samples[0].epoch, samples[0].position)


class StreamReader(IterableDataset):
    """One rank's samples of a `SharedStream`. A worker process yields only the samples of its own micro-batches."""

    def __init__(self, stream: SharedStream, share: StreamShare, *, seeded: bool = True) -> None:
        self.stream, self.share, self.is_seeded = stream, share, seeded
        self.seed = self.epoch = self.position = 0

    def __iter__(self) -> Iterator[Any]:
        share, worker = self.share, get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        has_updates = share.global_batch is not None
        groups = self._of_complete_updates() if has_updates else self._of_one_epoch()
        for index, (group, begin, end) in enumerate(groups):
            # The DataLoader takes batches from its workers in turn: worker k of K makes micro-batches k, k + K, ...
            if index % workers != number:
                continue
            mine = rank_share(group, rank=share.rank, world_size=share.world_size, drop_last=share.drop_last)
            drawn = (Draw(sample, (self.seed, *begin, share.rank)) for sample in mine) if self.is_seeded else mine
            yield from (Placed(one, *end) for one in drawn) if has_updates else drawn

    def _of_one_epoch(self) -> Iterator[Group]:
        """The global micro-batches of this epoch.

        The last one may be incomplete: ranks take equally many samples of it, or none with `drop_last`.
        """
        source, size = _Chain(self), self.share.micro_batch_size * self.share.world_size
        for first in itertools.count(self.position, size):
            group = source.take(size)
            if not group or (len(group) < size and self.share.drop_last):
                return
            yield group, (self.epoch, first), (self.epoch, first + size)

    def _of_complete_updates(self) -> Iterator[Group]:
        """The global micro-batches up to the first end of an update at or behind the end of this epoch's stream."""
        source, size = _Chain(self), self.share.micro_batch_size * self.share.world_size
        per_update = (self.share.global_batch or size) // size
        while source.epoch == self.epoch:
            for number in range(per_update):
                begin = source.place
                group = source.take(size)
                if not group and not number:
                    return  # the epoch has ended with an update
                while len(group) < size:
                    source.begin_next_epoch()
                    group += source.take(size - len(group))
                yield group, begin, source.place


Group = tuple[list[Any], tuple[int, int], tuple[int, int]]
"""The samples of a global micro-batch, (epoch, position) of the first sample, and that after the last sample."""


class _Chain:
    """The streams of a reader's epochs, one after the other, from the reader's position on."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        self._open(reader.epoch, reader.position)

    def _open(self, epoch: int, position: int) -> None:
        reader = self._reader
        self.epoch, self.position = epoch, position
        self._source = reader.stream.read(seed=reader.seed, epoch=epoch, position=position, seeded=reader.is_seeded)

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and position of the next sample."""
        return self.epoch, self.position

    def take(self, count: int) -> list[Any]:
        """The next samples of this epoch; fewer at its end."""
        samples = _take_without_worker_info(self._source, count)
        self.position += len(samples)
        return samples

    def begin_next_epoch(self) -> None:
        """Begin the next epoch. Raises `DataArgumentError` if the epoch that ends had no samples."""
        if not self.position:
            raise DataArgumentError(
                f"SharedStream: got no sample in epoch {self.epoch}, expected at least one: what is left over of an"
                " epoch waits for the next one's; make the dataset iterable more than once"
            )
        self._open(self.epoch + 1, 0)


def _take_without_worker_info(source: Iterator[Any], count: int) -> list[Any]:
    """The next `count` samples of `source`. Meanwhile `get_worker_info()` returns None, as outside of a worker.

    A dataset that calls `get_worker_info()` (those of Hugging Face do) would otherwise yield only this worker's part.
    """
    known = worker_module._worker_info
    with preserve_random_states():
        worker_module._worker_info = None
        try:
            return list(itertools.islice(source, count))
        finally:
            worker_module._worker_info = known
