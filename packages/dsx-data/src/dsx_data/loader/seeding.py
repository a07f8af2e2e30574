"""Random augmentations as a function of the run's seed and the sample's position, so that a resumed run repeats them.

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

__all__ = ["Draw", "NumberedDraws", "SeededCollate", "SeededSamples", "preserve_random_states", "seed_generators"]

_COLLATE = -1
"""Comes before the key when a batch is collated, so that collating draws other numbers than its first sample."""


class Draw(NamedTuple):
    """A sample, or the number of a sample to read, and the numbers that seed the generators for it."""

    what: Any
    key: tuple[int, ...]


class _Fetched(NamedTuple):
    """The samples of a batch, and the key of its first sample."""

    samples: Any
    key: tuple[int, ...]


def seed_generators(*numbers: int) -> None:
    """Seed the generators of Python, numpy and torch (CPU) with a function of `numbers`."""
    seed = mixed(numbers)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 1)  # torch.manual_seed would also seed every device


@contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore the states of the generators at the end. In a worker process nothing depends on them: nothing is done."""
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
    """A sampler or batch sampler that yields `Draw`s: sample numbers with the numbers that seed their reading.

    Args:
        source: the sampler or batch sampler to read from.
        batches: whether `source` is a batch sampler. (A sampler may also yield lists, for datasets that take them.)
        key: maps a sample number and the count of samples drawn before it in this loop to the seeding numbers.
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
    """A map-style dataset that is indexed by `Draw`s; `SeededCollate` collates the batches it returns."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._whole_batches = callable(getattr(dataset, "__getitems__", None))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, draws: list[Draw]) -> _Fetched:
        key = draws[0].key
        with preserve_random_states():
            if self._whole_batches:
                seed_generators(*key)
                return _Fetched(self._dataset.__getitems__([draw.what for draw in draws]), key)
            samples = []
            for draw in draws:
                seed_generators(*draw.key)
                samples.append(self._dataset[draw.what])
            return _Fetched(samples, key)


class SeededCollate:
    """A collate function that seeds the generators for each batch.

    It takes what `SeededSamples` fetched, or a list of `Draw`s of samples.

    Args:
        collate: the function to call; None: `default_collate` of torch.
    """

    def __init__(self, collate: Callable[[Any], Any] | None) -> None:
        self._collate = default_collate if collate is None else collate

    def __call__(self, fetched: _Fetched | list[Draw]) -> Any:
        """Seed the generators and collate one batch."""
        if isinstance(fetched, list):
            fetched = _Fetched([draw.what for draw in fetched], fetched[0].key)
        with preserve_random_states():
            seed_generators(_COLLATE, *fetched.key)
            return self._collate(fetched.samples)
