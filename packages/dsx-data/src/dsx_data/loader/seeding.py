"""Random augmentations as a function of the run's seed and the sample's place, so that a resumed run repeats them.

torch gives each worker process its own random state, which no checkpoint holds: a resumed run would draw
other crops, flips and masks than a run that never stopped, and so would a run with another number of workers. Here
Python's, numpy's and torch's generators are seeded before each sample is read, and again before a batch is collated,
with numbers that depend only on the order of the samples. In the training process the states of the generators are
restored afterwards, so that dropout and other random operations do not change.

Left out: generators that the dataset owns. Datasets that fetch whole batches (`__getitems__`) are seeded once per
batch, so they, like random collate functions, repeat only with the same number of ranks and batch size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler, default_collate, get_worker_info

from ..randomness import mixed

__all__ = ["Draw", "NumberedDraws", "SeededCollate", "SeededSamples", "kept_random_states", "seed_generators"]

_COLLATE = -1
"""Stands before a sample's numbers where a batch is put together, so that it draws something else than the sample."""


class Draw(NamedTuple):
    """A sample, or the number of one that is to be read, and the numbers that seed the generators for it."""

    what: Any
    key: tuple[int, ...]


class _Fetched(NamedTuple):
    """The samples of a batch, and the numbers of its first one."""

    samples: Any
    key: tuple[int, ...]


def seed_generators(*numbers: int) -> None:
    """Make what Python's, numpy's and torch's (CPU) generators draw next a function of `numbers`."""
    seed = mixed(numbers)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 1)  # torch.manual_seed would seed every device, too


@contextmanager
def kept_random_states() -> Iterator[None]:
    """The generators have their states back at the end; a worker process has nothing to keep."""
    if get_worker_info() is not None:
        yield
        return
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


class NumberedDraws(Sampler):
    """Sample numbers, or lists of them, with the numbers that seed their reading.

    Args:
        source: the sampler or batch sampler.
        batches: whether it is a batch sampler. (A sampler may yield lists, too, for datasets that take them.)
        key: from sample number and count of the samples drawn before in this loop to the seeding numbers.
    """

    def __init__(self, source: Any, key: Callable[[int, int], tuple[int, ...]], *, batches: bool) -> None:
        self._source, self._key, self._batches = source, key, batches

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for drawn in self._source:
            if self._batches:
                yield [Draw(index, self._key(index, count + place)) for place, index in enumerate(drawn)]
                count += len(drawn)
            else:
                yield Draw(drawn, self._key(drawn, count))
                count += 1

    def __len__(self) -> int:
        return len(self._source)


class SeededSamples:
    """A map-style dataset that is read by `Draw`s; gives a batch to `SeededCollate`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._whole_batches = callable(getattr(dataset, "__getitems__", None))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, draws: list[Draw]) -> _Fetched:
        key = draws[0].key
        with kept_random_states():
            if self._whole_batches:
                seed_generators(*key)
                return _Fetched(self._dataset.__getitems__([draw.what for draw in draws]), key)
            samples = []
            for draw in draws:
                seed_generators(*draw.key)
                samples.append(self._dataset[draw.what])
            return _Fetched(samples, key)


class SeededCollate:
    """A collate function that is seeded for each batch. None: torch's. Takes what `SeededSamples` fetched, or a list of
    `Draw`s of samples.
    """

    def __init__(self, collate: Callable[[Any], Any] | None) -> None:
        self._collate = default_collate if collate is None else collate

    def __call__(self, fetched: _Fetched | list[Draw]) -> Any:
        """Put a batch together."""
        if isinstance(fetched, list):
            fetched = _Fetched([draw.what for draw in fetched], fetched[0].key)
        with kept_random_states():
            seed_generators(_COLLATE, *fetched.key)
            return self._collate(fetched.samples)
