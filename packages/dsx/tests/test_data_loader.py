"""The loader's order: shared out evenly, another each epoch, resumable at any number of ranks."""

import pytest
import torch
from dsx.data import LoaderOptions, RepeatingLoader, ShardedSampler, TrainingLoader, epoch_order, rank_share
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
    assert states[0] == {"seed": 0, "epoch": 0, "position": 12}
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
    order = epoch_order(2, seed=0, epoch=0, shuffle=False)
    assert [rank_share(order, rank=r, world_size=5, drop_last=False) for r in range(5)] == [[0], [1], [0], [1], [0]]


def test_iterable_datasets_are_read_as_they_come():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    one = TrainingLoader(Stream(), LoaderOptions(2))
    assert samples(one) == [0, 1, 2, 3, 4] and one.epoch == 1
    assert one.state_dict() == {"epoch": 1}


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
