"""The loader's order: shared out evenly, another each epoch, resumable at any number of ranks."""

import pytest
import torch
from dsx_data import LoaderOptions, RepeatingLoader, TrainingLoader
from dsx_data.errors import DataArgumentError, DataStateError
from dsx_data.loader import ShardedSampler, epoch_order, rank_share
from torch.utils.data import DistributedSampler, IterableDataset


def loader(length, *, micro=2, rank=0, world=1, **options):
    return TrainingLoader(list(range(length)), LoaderOptions(micro, rank=rank, world_size=world, **options))


def samples(loader):
    return [int(i) for batch in loader for i in batch]


def interleaved(length, world, *, micro=2, epochs=1, state=None, **options):
    """What all ranks together read, global micro-batch by global micro-batch."""
    loaders = [loader(length, micro=micro, rank=r, world=world, **options) for r in range(world)]
    for one in loaders:
        if state is not None:
            one.load_state_dict(state)
    return [
        [sorted(int(i) for batch in step for i in batch) for step in zip(*loaders, strict=True)] for _ in range(epochs)
    ]


@pytest.mark.parametrize("length", [1, 7, 12, 13])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_shares_are_those_of_torchs_sampler(length, world, drop_last):
    for rank in range(world):
        for shuffle in (False, True):
            ours = ShardedSampler(length, rank=rank, world_size=world, shuffle=shuffle, seed=3, drop_last=drop_last)
            theirs = DistributedSampler(range(length), world, rank, shuffle=shuffle, seed=3, drop_last=drop_last)
            for epoch in (0, 1):
                ours.set_epoch(epoch)
                theirs.set_epoch(epoch)
                if drop_last and length % world:
                    # torch drops a tail, too; it may come one short when the length divides after rounding up.
                    assert len(list(ours)) == length // world
                else:
                    assert list(ours) == list(theirs)
                assert len(ours) == len(list(ours))


def test_each_epoch_has_another_order_and_all_samples():
    one = loader(20, micro=4)
    first, second = samples(one), samples(one)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert samples(loader(20, micro=4)) == first, "the order is a function of seed and epoch"
    assert samples(loader(20, micro=4, seed=1)) != first


def test_global_batches_do_not_depend_on_the_number_of_ranks():
    assert interleaved(24, 1, micro=6) == interleaved(24, 2, micro=3) == interleaved(24, 3, micro=2)


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_reads_exactly_what_is_left(before, after, workers):
    whole = [i for step in interleaved(24, 1, micro=6)[0] for i in step]
    running = [loader(24, micro=6 // before, rank=r, world=before, num_workers=workers) for r in range(before)]
    iterators = [iter(one) for one in running]
    used = [int(i) for _ in range(2) for it in iterators for i in next(it)]
    states = [one.state_dict() for one in running]
    assert states[0] == {"seed": 0, "epoch": 0, "position": 12, "length": 24}
    assert all(state == states[0] for state in states)
    rest = interleaved(24, after, micro=6 // after, state=states[0])[0]
    assert sorted(used) == sorted(whole[:12])
    assert [i for step in rest for i in step] == whole[12:]
    assert [i for s in interleaved(24, after, micro=6 // after, state=states[0], epochs=2)[1] for i in s] == [
        i for s in interleaved(24, 1, micro=6, epochs=2)[1] for i in s
    ]


def test_state_saved_in_the_last_batch_resumes_with_the_next_epoch():
    one = loader(8, micro=4)
    for batch in one:
        state = one.state_dict()
    other = loader(8, micro=4)
    other.load_state_dict(state)
    assert other.epoch == 1 and samples(other) == samples(one)


def test_leaving_a_loop_early_ends_its_epoch():
    one = loader(12)
    for _ in one:
        break
    fresh = loader(12)
    fresh.set_epoch(1)
    assert samples(one) == samples(fresh)


def test_repeating_loader_goes_on_with_the_next_epoch():
    twice = RepeatingLoader(loader(6, micro=3))
    got = [next(twice).tolist() for _ in range(4)]
    plain = loader(6, micro=3)
    assert got == [batch.tolist() for _ in range(2) for batch in plain]
    assert twice.state_dict()["epoch"] == 1
    with pytest.raises(ValueError, match="empty loader"):
        next(RepeatingLoader([]))


def test_drop_last_drops_partial_batches_on_all_ranks_alike():
    lengths = {len(list(loader(23, micro=4, rank=r, world=2, drop_last=True))) for r in range(2)}
    assert lengths == {2}
    assert [len(b) for b in loader(23, micro=4, rank=1, world=2)] == [4, 4, 4]


def test_fewer_samples_than_ranks_are_repeated():
    order = epoch_order(2, seed=0, epoch=0, shuffle=False).tolist()
    assert [rank_share(order, rank=r, world_size=5, drop_last=False) for r in range(5)] == [[0], [1], [0], [1], [0]]


def test_iterable_datasets_are_read_as_they_come():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    one = TrainingLoader(Stream(), LoaderOptions(2))
    assert samples(one) == [0, 1, 2, 3, 4] and one.epoch == 1
    assert one.state_dict() == {"epoch": 1, "batches": 0, "world_size": 1, "num_workers": 0}


def test_a_sampler_of_the_user_keeps_its_order_and_hears_of_epochs():
    class Reverse:
        epochs = []

        def __iter__(self):
            return iter([3, 2, 1, 0])

        def __len__(self):
            return 4

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    one = TrainingLoader(torch.arange(4), LoaderOptions(2, sampler=Reverse()))
    assert samples(one) == [3, 2, 1, 0] and samples(one) == [3, 2, 1, 0]
    assert Reverse.epochs == [1, 2]


def test_batch_size_must_be_positive():
    with pytest.raises(ValueError, match="micro_batch_size: got 0"):
        loader(4, micro=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_two_then_three_then_one_rank_use_every_sample_once(workers):
    used, state = [], None
    for world, steps in ((2, 3), (3, 4), (1, None)):
        loaders = [loader(60, micro=6 // world, rank=r, world=world, num_workers=workers) for r in range(world)]
        for one in loaders:
            if state is not None:
                one.load_state_dict(state)
        for number, group in enumerate(zip(*loaders, strict=True)):
            used += [int(i) for batch in group for i in batch]
            state = loaders[-1].state_dict()
            if steps is not None and number + 1 == steps:
                break
    assert sorted(used) == list(range(60)) and state["position"] == 60


def test_ten_million_samples_are_shared_out_in_little_memory():
    sampler = ShardedSampler(10_000_000, rank=3, world_size=8)
    iterator = iter(sampler)
    first = [next(iterator) for _ in range(3)]
    assert first == epoch_order(10_000_000, seed=0, epoch=0, shuffle=True)[3::8][:3].tolist()
    assert len(sampler) == 1_250_000


def test_another_length_is_said(caplog):
    state = loader(10).state_dict()
    loader(12).load_state_dict(state)
    assert "saved with a dataset of 10 samples, this one has 12" in caplog.text


def test_a_sampler_without_state_is_skipped_and_one_with_state_is_asked():
    class Plain:
        def __iter__(self):
            return iter(range(12))

        def __len__(self):
            return 12

    one = loader(12, sampler=Plain())
    for _, batch in zip(range(2), one):
        state = one.state_dict()
    again = loader(12, sampler=Plain())
    again.load_state_dict(state)
    assert batch.tolist() == [2, 3] and samples(again) == list(range(4, 12)) and samples(again) == list(range(12))
    with pytest.raises(DataStateError, match="give it state_dict"):
        loader(12, micro=3, sampler=Plain()).load_state_dict(state)

    class Stateful(Plain):
        loaded = None

        def state_dict(self):
            return {"at": 7}

        def load_state_dict(self, state):
            self.loaded = state

    sampler = Stateful()
    kept = loader(12, sampler=sampler)
    kept.load_state_dict(kept.state_dict())
    assert sampler.loaded == {"at": 7}


def test_post_process_sees_batch_and_state():
    one = loader(6, micro=2, shuffle=False)
    one.set_post_process(lambda batch, state: (batch * 10, state["position"]))
    assert [(b.tolist(), p) for b, p in one] == [([0, 10], 2), ([20, 30], 4), ([40, 50], 6)]
    with pytest.raises(DataArgumentError, match="expected a function"):
        one.set_post_process(3)


class HuggingFaceLike:
    """The methods by which a map-style dataset of Hugging Face is known."""

    column_names = ["input_ids"]

    def __init__(self, kind=None):
        self.format = {"type": kind}

    def with_format(self, kind):
        return HuggingFaceLike(kind)

    def __len__(self):
        return 4

    def __getitems__(self, numbers):
        rows = [{"input_ids": [i, i + 1, i + 2]} for i in numbers]
        return [{k: torch.tensor(v) for k, v in row.items()} for row in rows] if self.format["type"] else rows

    def __getitem__(self, number):
        return self.__getitems__([number])[0]


def test_a_hugging_face_dataset_gives_rows_of_tensors():
    one = TrainingLoader(HuggingFaceLike(), LoaderOptions(2, shuffle=False))
    assert next(iter(one))["input_ids"].tolist() == [[0, 1, 2], [1, 2, 3]]

    class Splits(dict):
        column_names = {"train": ["input_ids"]}

    with pytest.raises(DataArgumentError, match=r"dictionary of splits \(train, test\); .* dataset\['train'\]"):
        TrainingLoader(Splits(train=HuggingFaceLike(), test=HuggingFaceLike()), LoaderOptions(2))


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(DataArgumentError, match="rank: got 2 of 2"):
        loader(4, rank=2, world=2)
    with pytest.raises(DataArgumentError, match="without workers"):
        loader(4, prefetch=2)
    with pytest.raises(DataArgumentError, match="expected one with __len__"):
        TrainingLoader(3, LoaderOptions(1))
