"""Iterable datasets: shared out by counting, resumed at any number of ranks and workers."""

from collections.abc import Sequence

import pytest
from dsx_data import LoaderOptions, SharedStream, TrainingLoader
from dsx_data.errors import DataArgumentError, DataStateError
from torch.utils.data import IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Skipping(Stream):
    skipped = 0

    def skip(self, count):
        Skipping.skipped = count
        return range(count, self.length)


def loaders(stream, world, *, global_batch=6, state=None, **options):
    made = [
        TrainingLoader(stream, LoaderOptions(global_batch // world, rank=r, world_size=world, **options))
        for r in range(world)
    ]
    for one in made:
        if state is not None:
            one.load_state_dict(state)
    return made


def groups(made):
    return [sorted(int(i) for batch in step for i in batch) for step in zip(*made, strict=True)]


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("world, workers", [(1, 0), (2, 0), (3, 2), (2, 3)])
def test_global_batches_do_not_depend_on_ranks_and_workers(window, world, workers):
    stream = SharedStream(Stream(36), shuffle_window=window)
    made = loaders(stream, world, num_workers=workers)
    first, second = groups(made), groups(made)
    alone = loaders(stream, 1)
    assert first == groups(alone) and second == groups(alone)
    assert sorted(i for group in first for i in group) == list(range(36))
    assert (first != second) == bool(window), "a window is shuffled differently in each epoch"
    if not window:
        assert first[0] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("window", [0, 10])
@pytest.mark.parametrize("workers", [0, 2])
def test_two_then_three_then_one_rank_use_every_sample_once(window, workers):
    stream = SharedStream(Stream(54), shuffle_window=window)
    used, state = [], None
    for world, steps in ((2, 2), (3, 3), (1, None)):
        made = loaders(stream, world, state=state, num_workers=workers)
        for number, group in enumerate(zip(*made, strict=True)):
            used += [int(i) for batch in group for i in batch]
            state = made[0].state_dict()
            if steps is not None and number + 1 == steps:
                break
    assert sorted(used) == list(range(54))


def test_an_unfinished_group_is_shared_evenly_or_dropped():
    stream = SharedStream(Stream(15))  # 6 + 6 + 3
    evenly = loaders(stream, 2)
    assert [[len(b) for b in one] for one in evenly] == [[3, 3, 2], [3, 3, 2]]
    dropped = loaders(stream, 2, drop_last=True)
    assert [[len(b) for b in one] for one in dropped] == [[3, 3], [3, 3]]


def test_a_state_of_the_last_batch_goes_on_with_the_next_epoch():
    stream = SharedStream(Stream(12), shuffle_window=12)
    (one,) = loaders(stream, 1)
    for _ in one:
        state = one.state_dict()
    (other,) = loaders(stream, 1, state=state)
    assert groups([other]) == groups([one])


def test_a_dataset_that_can_skip_is_asked_to():
    (one,) = loaders(SharedStream(Skipping(30)), 1, state={"seed": 0, "epoch": 0, "position": 18})
    assert groups([one]) == [[18, 19, 20, 21, 22, 23], [24, 25, 26, 27, 28, 29]] and Skipping.skipped == 18


class Counted(Sequence):
    """A sequence of 10^9 numbers that counts which it is asked for."""

    def __init__(self, length=10**9):
        self.length, self.asked = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        if not 0 <= number < self.length:
            raise IndexError(number)
        self.asked.append(number)
        return number


@pytest.mark.parametrize("window", [0, 8])
def test_a_sequence_is_read_from_its_position_on(window):
    near_end = 10**9 - 10
    samples = Counted()
    state = {"seed": 0, "epoch": 0, "position": near_end}
    (one,) = loaders(SharedStream(samples, shuffle_window=window), 1, state=state, seed_samples=True)
    rest = [number for group in groups([one]) for number in group]
    assert len(rest) == 10 and set(rest) <= set(range(near_end - 8, 10**9)) and len(samples.asked) <= 18
    assert window or rest == list(range(near_end, 10**9))


def test_a_resumed_sequence_gives_what_a_stream_without_numbers_gives():
    state = {"seed": 0, "epoch": 1, "position": 18}
    for window in (0, 8):
        by_number, in_turn = (
            loaders(SharedStream(data, shuffle_window=window), 2, state=state) for data in (Counted(30), Stream(30))
        )
        assert groups(by_number) == groups(in_turn)


def test_a_skip_that_gives_nothing_is_named():
    class Broken(Stream):
        def skip(self, count):
            pass

    (one,) = loaders(SharedStream(Broken(30)), 1, state={"seed": 0, "epoch": 0, "position": 18})
    with pytest.raises(DataArgumentError, match=r"got NoneType from Broken\.skip\(18\), expected an iterable"):
        next(iter(one))


class SharesItself(IterableDataset):
    """What torch's documentation asks of an iterable dataset: another part for each worker."""

    def __iter__(self):
        worker = get_worker_info()
        return iter(range(worker.id, 24, worker.num_workers) if worker else range(24))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_shares_itself_out_resumes_at_its_own_layout_only(workers):
    one = TrainingLoader(SharesItself(), LoaderOptions(3, num_workers=workers))
    whole = [batch.tolist() for batch in one]
    one.set_epoch(0)
    for _, batch in zip(range(3), one):
        state = one.state_dict()
    again = TrainingLoader(SharesItself(), LoaderOptions(3, num_workers=workers))
    again.load_state_dict(state)
    assert batch.tolist() == whole[2] and [b.tolist() for b in again] == whole[3:]
    with pytest.raises(DataStateError, match="SharedStream, which resumes with any"):
        TrainingLoader(SharesItself(), LoaderOptions(3, num_workers=1)).load_state_dict(state)


def test_a_shared_stream_is_read_whole_by_every_worker(caplog):
    expected = groups(loaders(SharedStream(Stream(24)), 1))
    assert groups(loaders(SharedStream(SharesItself()), 2, num_workers=2)) == expected
    assert not caplog.text
    loaders(SharesItself(), 2)
    assert "all 2 train on the same samples; wrap it in dsx_data.SharedStream" in caplog.text


def test_mistakes_are_named():
    with pytest.raises(DataArgumentError, match="shuffle_window"):
        SharedStream([1], shuffle_window=-1)
    with pytest.raises(DataArgumentError, match="expected an iterable"):
        SharedStream(3)
