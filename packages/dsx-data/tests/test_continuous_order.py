"""Epochs of whole updates: each update has the same samples at any number of ranks, and none is lost or used twice."""

import itertools

import dsx_data
import dsx_data.errors
import pytest
import torch
from dsx_data import LoaderOptions, TrainingLoader

LENGTH, BATCH = 22, 12
LAYOUTS = [(1, 12), (1, 4), (2, 3), (2, 6), (3, 2), (3, 4), (6, 2), (12, 1)]


class Numbers(torch.utils.data.Dataset):
    def __init__(self, length=LENGTH):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index, torch.rand(())


def loaders(world, micro, length=LENGTH, **changes):
    options = {"shuffle": True, "seed": 5, "global_batch": BATCH, "micro_batch_size": micro, **changes}
    return [
        TrainingLoader(Numbers(length), LoaderOptions(rank=rank, world_size=world, **options)) for rank in range(world)
    ]


def micro_batches(ranks, epochs):
    """Of each epoch, the micro-batches of all ranks together."""
    for _ in range(epochs):
        yield [
            [pair for batch in group for pair in zip(*map(torch.Tensor.tolist, batch))]
            for group in zip(*ranks, strict=True)
        ]


def updates(ranks, micro, epochs):
    """Sets of the samples of each update, and whether epochs ended with whole updates."""
    per_update = BATCH // (micro * len(ranks))
    found = []
    for epoch in micro_batches(ranks, epochs):
        assert len(epoch) % per_update == 0
        for first in range(0, len(epoch), per_update):
            found.append(sorted(itertools.chain.from_iterable(epoch[first : first + per_update])))
    return found


@pytest.mark.parametrize("length", [LENGTH, 24, 12, 5, 1])
def test_every_layout_has_the_same_updates_and_no_sample_is_lost_or_used_twice(length):
    expected = updates(loaders(1, 12, length), 12, 7)
    for world, micro in LAYOUTS:
        assert updates(loaders(world, micro, length), micro, 7) == expected, (world, micro)
    sequence = [number for update in expected for number, _ in update]
    counts = [sequence.count(number) for number in range(length)]
    assert max(counts) - min(counts) <= 1 and sum(counts) == BATCH * len(expected)


def test_the_orders_are_those_of_the_epochs_one_behind_the_other():
    orders = [dsx_data.loader.epoch_order(LENGTH, seed=5, epoch=epoch, shuffle=True) for epoch in range(3)]
    endless = list(itertools.chain.from_iterable(order.tolist() for order in orders))
    (loader,) = loaders(1, 12)
    seen = [number for epoch in range(2) for batch, _ in loader for number in batch.tolist()]
    assert seen == endless[:48] and len(loader) == 2  # 24 of 22 samples, then 24 that begin with the third


@pytest.mark.parametrize("saved_by", [(2, 3), (6, 2), (1, 4)])
@pytest.mark.parametrize("loaded_by", [(3, 4), (1, 12), (12, 1)])
def test_a_run_goes_on_after_any_update_with_any_layout(saved_by, loaded_by):
    world, micro = saved_by
    expected = updates(loaders(1, 12), 12, 8)
    for stop in range(1, 8):
        first = loaders(world, micro)
        iterators = [iter(dsx_data.RepeatingLoader(loader)) for loader in first]
        for _ in range(stop * BATCH // (world * micro)):
            for iterator in iterators:
                next(iterator)
        states = [loader.state_dict() for loader in first]
        assert all(state == states[0] for state in states)
        second = loaders(*loaded_by, seed=99)
        for loader in second:
            loader.load_state_dict(states[0])
        assert updates(second, loaded_by[1], 2)[:3] == expected[stop : stop + 3]


def test_the_state_of_the_ordinary_order_is_read_and_the_other_way_round():
    (ordinary,) = loaders(1, 2, global_batch=None)
    for _, _ in itertools.islice(ordinary, 6):
        pass
    (whole,) = loaders(1, 4)
    whole.load_state_dict(ordinary.state_dict())
    (back,) = loaders(1, 2, global_batch=None)
    back.load_state_dict(whole.state_dict())
    order = dsx_data.loader.epoch_order(LENGTH, seed=5, epoch=0, shuffle=True).tolist()
    for loader in (whole, back):
        assert next(iter(loader))[0].tolist() == order[12 : 12 + loader.batch_size]


def test_a_loop_that_is_left_early_ends_its_epoch():
    (loader,) = loaders(1, 4)
    next(iter(loader))
    assert loader.epoch == 0
    first = next(iter(loader))[0].tolist()
    (other,) = loaders(1, 4)
    other.set_epoch(1)
    assert loader.epoch == other.epoch == 1 and next(iter(other))[0].tolist() == first


def test_what_cannot_be_shared_out_is_refused():
    with pytest.raises(dsx_data.errors.DataArgumentError, match="got 12, expected a multiple of 10"):
        loaders(2, 5)
    with pytest.raises(dsx_data.errors.DataArgumentError, match="without samples"):
        loaders(2, 3, length=0)
