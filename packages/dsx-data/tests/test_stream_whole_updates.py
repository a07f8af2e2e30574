"""A shared stream in epochs of whole updates: each update has the same samples at any number of ranks and workers."""

import itertools

import pytest
import torch
from dsx_data import LoaderOptions, RepeatingLoader, SharedStream, TrainingLoader
from dsx_data.errors import DataArgumentError

LENGTH, BATCH = 22, 12
LAYOUTS = [(1, 12, 0), (1, 4, 2), (2, 3, 0), (2, 6, 3), (3, 2, 0), (3, 4, 0), (6, 2, 0), (12, 1, 0)]


class Stream:
    """Tells the epoch of each sample, and draws a random number for it."""

    def __init__(self, length=LENGTH):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return self.after(0)

    def after(self, count):
        for index in range(count, self.length):
            yield self.epoch, index, torch.rand(())


class Skipping(Stream):
    def skip(self, count):
        return self.after(count)


def loaders(world, micro, workers=0, *, stream=Stream, length=LENGTH, window=0, **changes):
    options = {"seed": 5, "global_batch": BATCH, "micro_batch_size": micro, "num_workers": workers, **changes}
    return [
        TrainingLoader(
            SharedStream(stream(length), shuffle_window=window), LoaderOptions(rank=rank, world_size=world, **options)
        )
        for rank in range(world)
    ]


def updates(ranks, micro, epochs):
    """The samples of each update, sorted. Every loop ends with a whole one, and every micro-batch is a full one."""
    per_update, found = BATCH // (micro * len(ranks)), []
    for _ in range(epochs):
        steps = list(zip(*ranks, strict=True))
        assert len(steps) % per_update == 0
        assert all(len(batch[0]) == micro for step in steps for batch in step)
        samples = [[tuple(s) for b in step for s in zip(*map(torch.Tensor.tolist, b))] for step in steps]
        for first in range(0, len(samples), per_update):
            found.append(sorted(itertools.chain.from_iterable(samples[first : first + per_update])))
    return found


def places(update):
    return [(epoch, index) for epoch, index, _ in update]


@pytest.mark.parametrize(
    "length, window, layouts",
    [
        (LENGTH, 0, LAYOUTS), (5, 0, LAYOUTS[2:]), (LENGTH, 7, LAYOUTS[2:3]), (24, 0, LAYOUTS[2:3]),
        (12, 5, LAYOUTS[2:3]), (1, 0, LAYOUTS[2:3]),
    ],
)  # fmt: skip
def test_every_layout_has_the_same_updates_and_no_sample_is_lost_or_used_twice(length, window, layouts):
    expected = updates(loaders(1, 12, length=length, window=window), 12, 5)
    sequence = [place for update in expected for place in places(update)]
    whole = [(epoch, index) for epoch in range(len(sequence) // length + 1) for index in range(length)]
    if window:  # the last epoch's order is another one than that of its numbers
        ended = [place for place in sequence if place[0] < max(sequence)[0]]
        assert len(set(sequence)) == len(sequence) and sorted(ended) == whole[: len(ended)]
    else:
        assert sorted(sequence) == whole[: len(sequence)]
    for world, micro, workers in layouts:
        assert updates(loaders(world, micro, workers, length=length, window=window), micro, 5) == expected


@pytest.mark.parametrize("stream", [Stream, Skipping])
@pytest.mark.parametrize("saved_by, loaded_by", [((2, 3), (3, 4)), ((1, 4), (12, 1)), ((6, 2), (1, 12))])
def test_a_run_goes_on_after_any_update_with_any_layout(saved_by, loaded_by, stream):
    world, micro = saved_by
    expected = updates(loaders(1, 12), 12, 6)
    for stop in range(1, 8):
        first = loaders(world, micro, stream=stream)
        iterators = [iter(RepeatingLoader(loader)) for loader in first]
        for _ in range(stop * BATCH // (world * micro)):
            for iterator in iterators:
                next(iterator)
        states = [loader.state_dict() for loader in first]
        assert all(state == states[0] for state in states)
        second = loaders(*loaded_by, stream=stream, seed=99)
        for loader in second:
            loader.load_state_dict(states[0])
        assert updates(second, loaded_by[1], 3)[:3] == expected[stop : stop + 3]


def test_the_state_is_exact_although_workers_read_ahead():
    (loader,) = loaders(1, 4, workers=2)
    expected = updates(loaders(1, 12), 12, 4)
    used = []
    for batch in itertools.islice(iter(loader), 5):
        used += list(zip(*map(torch.Tensor.tolist, batch)))
    assert loader.state_dict() == {"seed": 5, "epoch": 0, "position": 20}
    assert sorted(used) == sorted(itertools.chain.from_iterable(expected))[: len(used)]


def test_the_state_of_the_ordinary_order_is_read_and_the_other_way_round():
    (ordinary,) = loaders(1, 4, global_batch=None)
    for _ in itertools.islice(iter(ordinary), 3):
        pass
    (whole,) = loaders(1, 4)
    whole.load_state_dict(ordinary.state_dict())
    assert next(iter(whole))[1].tolist() == [12, 13, 14, 15]
    (back,) = loaders(1, 4, global_batch=None)
    back.load_state_dict(whole.state_dict())
    assert next(iter(back))[1].tolist() == [16, 17, 18, 19]


def test_a_loop_that_is_left_early_ends_its_epoch():
    (loader,) = loaders(1, 4)
    next(iter(loader))
    assert loader.epoch == 0
    epoch, index, _ = next(iter(loader))
    assert (epoch.tolist(), index.tolist(), loader.epoch) == ([1] * 4, [0, 1, 2, 3], 1)


def test_batches_come_as_they_are_without_seeds_too():
    (loader,) = loaders(1, 6, seed_samples=False, collate_fn=list)
    first = next(iter(loader))
    assert isinstance(first, list) and [index for _, index, _ in first] == list(range(6))


def test_mistakes_are_named():
    with pytest.raises(DataArgumentError, match="got 12, expected a multiple of 10"):
        loaders(2, 5)
    once = SharedStream(iter([1, 2, 3]))
    (loader,) = [TrainingLoader(once, LoaderOptions(2, global_batch=2))]
    with pytest.raises(DataArgumentError, match=r"got no sample in epoch 1.*iterable more than once"):
        list(loader)
