"""The order of data sets with more samples than an array of them should hold."""

import itertools
import tracemalloc

import dsx_data.loader.continuous
import dsx_data.loader.order
import dsx_data.loader.tracks
import numpy as np
import pytest
import torch
from dsx_data import LoaderOptions, TrainingLoader
from dsx_data.errors import DataStateError
from dsx_data.loader import ShardedSampler, epoch_order
from dsx_data.loader.continuous import ContinuousSampler
from dsx_data.loader.order import KEYED_ABOVE
from dsx_data.loader.permutation import KeyedPermutation

BILLION = 10**9


def test_every_number_comes_once_for_every_small_length():
    for length in range(1, 301):
        assert sorted(KeyedPermutation(length, 7, length)(np.arange(length))) == list(range(length))


@pytest.mark.parametrize("length", [65_535, 65_536, 65_537, 300_007])
def test_every_number_comes_once_for_larger_lengths(length):
    order = KeyedPermutation(length, 1, 2)(np.arange(length))
    assert order.dtype == np.int64 and np.array_equal(np.sort(order), np.arange(length))
    assert np.count_nonzero(order == np.arange(length)) < 12  # a random permutation leaves one number in place


def test_numbers_of_a_huge_length_are_in_range_and_differ():
    for length in (BILLION, 2**40 + 1):
        order = KeyedPermutation(length, 0, 0)(np.arange(length - 100_000, length))
        assert order.min() >= 0 and order.max() < length and len(np.unique(order)) == 100_000


def test_each_seed_and_each_epoch_has_its_own_order():
    places = np.arange(100_000)
    orders = [KeyedPermutation(BILLION, seed, epoch)(places) for seed in range(3) for epoch in range(3)]
    for one, other in itertools.combinations(orders, 2):
        assert np.count_nonzero(one == other) < 3


def test_places_drawn_in_pieces_are_those_drawn_as_a_whole():
    order = KeyedPermutation(10_007, 3, 4)
    whole = order(np.arange(10_007))
    cuts = np.random.default_rng(0).permutation(10_007)
    assert np.array_equal(order(cuts), whole[cuts])
    assert np.array_equal(
        np.concatenate([order(np.arange(i, min(i + 64, 10_007))) for i in range(0, 10_007, 64)]), whole
    )


def chi_square(counts: np.ndarray) -> float:
    """How far counts are from even, in standard deviations of the chi-square distribution."""
    expected, free = counts.sum() / counts.size, counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / (2 * free) ** 0.5)


def test_the_numbers_are_spread_evenly():
    # 100 consecutive places of 10^9 samples under 2000 keys: where they fall, and how far apart neighbours are.
    drawn = np.stack([KeyedPermutation(BILLION, seed, 5)(np.arange(100)) for seed in range(2000)])
    assert abs(chi_square(np.bincount(drawn.ravel() * 256 // BILLION, minlength=256))) < 4
    distances = np.diff(drawn, axis=1) % BILLION
    assert abs(chi_square(np.bincount(distances.ravel() * 256 // BILLION, minlength=256))) < 4
    assert abs(chi_square(np.bincount(drawn.ravel() % 64, minlength=64))) < 4
    # All 24 orders of four numbers are equally frequent.
    four = np.stack([KeyedPermutation(4, seed, 1)(np.arange(4)) for seed in range(4800)])
    assert abs(chi_square(np.unique(four @ [64, 16, 4, 1], return_counts=True)[1])) < 4


def test_up_to_the_limit_the_order_is_the_array_of_before():
    generator = torch.Generator().manual_seed(3 + 4)
    assert (
        epoch_order(1000, seed=3, epoch=4, shuffle=True).tolist() == torch.randperm(1000, generator=generator).tolist()
    )
    assert KEYED_ABOVE == 2**24 and not ShardedSampler(KEYED_ABOVE, rank=0, world_size=1).keyed
    assert ShardedSampler(KEYED_ABOVE + 1, rank=0, world_size=1).keyed


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_billion_samples_take_the_memory_of_a_piece(shuffle):
    continuous = ContinuousSampler(
        BILLION, rank=3, world_size=1024, micro_batch_size=1, global_batch=2048, shuffle=shuffle, seed=9
    )
    sampler = ShardedSampler(BILLION, rank=3, world_size=1024, shuffle=shuffle, seed=9)
    sampler.position = BILLION // 2 // 1024 * 1024
    tracemalloc.start()
    first = list(itertools.islice(sampler, 70_000))
    ahead = list(itertools.islice(continuous, 70_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    places = np.arange(3, 1024 * 70_000, 1024)
    order = KeyedPermutation(BILLION, 9, 0) if shuffle else lambda places: places
    assert first == order(sampler.position + places).tolist() and ahead == order(places).tolist()


class Samples:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def loader(rank, world, length, **options):
    return TrainingLoader(
        Samples(length), LoaderOptions(micro_batch_size=12 // world, rank=rank, world_size=world, seed=6, **options)
    )


@pytest.fixture
def keyed_above_20(monkeypatch):
    for module in (dsx_data.loader.order, dsx_data.loader.continuous, dsx_data.loader.tracks):
        monkeypatch.setattr(module, "KEYED_ABOVE", 20)


@pytest.mark.parametrize("global_batch", [None, 24])
def test_a_run_resumes_exactly_at_another_number_of_ranks(keyed_above_20, global_batch):
    length, used, state = 101, [], {}
    for world, steps in ((2, 3), (3, 2), (1, 1), (4, None)):
        loaders = [loader(rank, world, length, global_batch=global_batch) for rank in range(world)]
        for one in loaders if state else []:
            one.load_state_dict(state)
        for number, group in enumerate(zip(*loaders, strict=True), 1):
            used += np.stack([batch.tolist() for batch in group], axis=1).ravel().tolist()
            state = loaders[0].state_dict()
            if number == steps:
                break
    assert state["order"] == "keyed"
    # Behind the end: samples repeated so that ranks have equally many, or those of the next epoch.
    assert used[:length] == epoch_order(length, seed=6, epoch=0, shuffle=True).tolist()
    assert used[:length] == KeyedPermutation(length, 6, 0)(np.arange(length)).tolist()


@pytest.mark.parametrize("global_batch", [None, 24])
def test_a_run_that_began_with_an_order_in_memory_keeps_it(keyed_above_20, global_batch):
    resumed = loader(0, 1, 101, global_batch=global_batch)
    resumed.load_state_dict({"seed": 6, "epoch": 0, "position": 24, "length": 101})
    expected = torch.randperm(101, generator=torch.Generator().manual_seed(6)).tolist()
    assert next(iter(resumed)).tolist() == expected[24:36] and "order" not in resumed.state_dict()
    with pytest.raises(DataStateError, match="got the order 'other', expected 'keyed' or none"):
        resumed.load_state_dict({**resumed.state_dict(), "order": "other"})
