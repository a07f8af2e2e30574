"""Random augmentations resume exactly: what is drawn for a sample depends on the seed and its place in the run only."""

import random

import numpy as np
import pytest
import torch
from dsx_data import CurriculumSampler, LoaderOptions, SharedStream, TokenBudget, TrainingLoader
from torch.utils.data import IterableDataset


class Augmented:
    """Each sample is its number and what the three generators draw for it."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return float(index), random.random(), float(np.random.rand()), float(torch.rand(()))


def rows(batches):
    """Draws of each sample by its number."""
    found = {}
    for batch in batches:
        for number, *draws in zip(*(part.tolist() for part in batch)):
            found.setdefault(int(number), []).append(tuple(draws))
    return found


def made(dataset=None, rank=0, world=1, workers=0, micro=2, **options):
    return TrainingLoader(
        Augmented() if dataset is None else dataset,
        LoaderOptions(micro, rank=rank, world_size=world, num_workers=workers, seed=5, **options),
    )


def stirred():
    """Leave the process's generators in a state that no other call has seen."""
    random.random(), np.random.rand(), torch.rand(())


@pytest.mark.parametrize("kind", ["order", "budget", "own sampler"])
def test_two_then_three_then_one_rank_draw_what_one_would(kind):
    def options():
        if kind == "budget":
            return {"budget": TokenBudget(np.full(24, 3), 6, order="random")}
        return {}

    if kind == "own sampler":  # an order of the caller's own holds for one layout
        whole = list(made(sampler=range(24)))
        one = made(sampler=range(24))
        for _, _ in zip(range(5), one):
            stirred()
        again = made(sampler=range(24), workers=2)
        again.load_state_dict(one.state_dict())
        assert rows(again) == rows(whole[5:])
        return
    whole = rows(made(**options()))
    assert len(whole) == 24 and len({draws for (draws,) in whole.values()}) == 24
    used, state = {}, None
    for world, workers, steps in ((2, 0, 2), (3, 2, 2), (1, 1, 99)):
        loaders = [made(rank=rank, world=world, workers=workers, **options()) for rank in range(world)]
        for one in loaders:
            stirred()
            if state is not None:
                one.load_state_dict(state)
        for number, group in enumerate(zip(*loaders)):
            used |= rows(group)
            state = loaders[0].state_dict()
            if number + 1 == steps:
                break
    assert used == whole


def test_each_epoch_draws_anew_and_the_training_process_is_left_alone():
    one = made()
    first, second = rows(one), rows(one)
    assert set(first) == set(second) and not any(first[i] == second[i] for i in first)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    list(made())
    found = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:]


def test_switched_off_the_process_decides():
    torch.manual_seed(1)
    first = rows(made(seed_samples=False))
    torch.manual_seed(2)
    assert rows(made(seed_samples=False)) != first
    assert rows(made()) == rows(made())


def test_a_random_collate_function_repeats_with_the_same_layout():
    def masked(samples):
        return torch.tensor([s[0] for s in samples]), torch.rand(len(samples))

    whole = list(made(collate_fn=masked))
    one = made(collate_fn=masked)
    for _, _ in zip(range(4), one):
        stirred()
    for workers in (0, 2):
        again = made(collate_fn=masked, workers=workers)
        again.load_state_dict(one.state_dict())
        for found, expected in zip(again, whole[4:], strict=True):
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


class Batched(Augmented):
    """Fetches whole batches, as Hugging Face datasets do."""

    def __getitems__(self, indices):
        return [(float(i), *torch.rand(3).tolist()) for i in indices]


def test_datasets_that_fetch_batches_repeat_with_the_same_layout():
    whole = list(made(Batched()))
    one = made(Batched())
    next(iter(one))
    state = one.state_dict()
    again = made(Batched(), workers=2)
    again.load_state_dict(state)
    assert rows(again) == rows(whole[1:])
    assert len({draws for every in rows(whole).values() for draws in every}) == 24


def test_a_sampler_may_yield_whatever_the_dataset_takes():
    class Pairs:
        def __len__(self):
            return 6

        def __getitem__(self, pair):
            return torch.tensor(pair)

    found = list(made(Pairs(), sampler=[[0, 1], [2, 3], [4, 5]]))
    assert [batch.tolist() for batch in found] == [[[0, 1], [2, 3]], [[4, 5]]]


class Stream(IterableDataset):
    def __init__(self):
        self.start = 0

    def __iter__(self):
        for number in range(self.start, 24):
            yield float(number), random.random(), float(np.random.rand()), float(torch.rand(()))


class SkippingStream(Stream):
    def skip(self, count):
        other = SkippingStream()
        other.start = count
        return other


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("source", [Stream, SkippingStream])
def test_streams_draw_the_same_for_each_sample(source, window):
    def loader(**options):
        return made(SharedStream(source(), shuffle_window=window), **options)

    whole = rows(loader())
    one = loader(workers=2)
    for _, _ in zip(range(3), one):
        stirred()
    again = [loader(rank=rank, world=2, workers=1) for rank in range(2)]
    for each in again:
        each.load_state_dict(one.state_dict())
    found = rows(again[0]) | rows(again[1])
    assert len(found) == 18 and all(found[i] == whole[i] for i in found)


class Metric:
    clustering_type = "single_cluster"
    min_difficulty, max_difficulty, schedule_type = 1, 4, "fixed_linear"
    schedule_config = {"total_curriculum_step": 10, "difficulty_step": 1}


def test_a_sample_that_a_curriculum_draws_twice_is_drawn_anew():
    def loader(**options):
        sampler = CurriculumSampler(24, {"m": Metric()}, global_batch_size=6, num_epochs=2)
        return made(sampler=sampler, **options)

    whole = list(loader(micro=6))
    drawn = rows(whole)
    assert all(len(set(draws)) == len(draws) == 2 for draws in drawn.values())
    one = loader(micro=3, world=2)
    for number, _ in enumerate(one):
        if number == 3:
            break
    again = loader(micro=6, workers=1)
    again.load_state_dict(one.state_dict())
    assert rows(again) == rows(whole[4:])
