"""Batches by a budget of tokens, against a greedy loop in plain Python; learning rates by batch size."""

import random

import numpy as np
import pytest
from dsx_data import LoaderOptions, TokenBudget, TrainingLoader, lr_factor
from dsx_data.errors import DataArgumentError, DataStateError


def reference(lengths, order, limit, most, cost):
    batches, current = [], []
    for sample in order:
        grown = [lengths[i] for i in [*current, sample]]
        size = sum(grown) if cost == "sum" else max(grown) * len(grown)
        if current and (size > limit or (most is not None and len(current) == most)):
            batches.append(current)
            current = []
        current = [*current, sample]
    return [*batches, current]


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("cost", ["sum", "padded"])
def test_batches_are_those_of_the_greedy_loop(seed, cost):
    draw = random.Random(seed)
    lengths = [draw.randrange(0, 40) for _ in range(draw.randrange(1, 200))]
    most = draw.choice([None, None, 3, 17])
    budget = TokenBudget(lengths, draw.randrange(40, 300), max_batch_size=most, cost=cost)
    for order, expected in (
        ("dataloader", range(len(lengths))), ("seqlen", sorted(range(len(lengths)), key=lambda i: (lengths[i], i))),
    ):  # fmt: skip
        plan = TokenBudget(lengths, budget.max_tokens, max_batch_size=most, cost=cost, order=order).plan()
        assert [batch.tolist() for batch in plan] == reference(lengths, expected, budget.max_tokens, most, cost)
        assert plan.left_out.size == 0, "the last sample has a place, too"


def test_random_orders_change_by_epoch_and_bucketed_ones_pad_little():
    lengths = np.random.default_rng(0).integers(1, 500, 3000)
    plain, random_order, bucketed = (
        TokenBudget(lengths, 4000, order=order, cost="padded") for order in ("dataloader", "random", "bucketed")
    )
    assert plain.plan(epoch=0).fingerprint() == plain.plan(epoch=1).fingerprint()
    for budget in (random_order, bucketed):
        assert budget.plan(epoch=0).fingerprint() != budget.plan(epoch=1).fingerprint()
        assert budget.plan(seed=1).fingerprint() == budget.plan(seed=1).fingerprint()
        assert sorted(budget.plan().samples.tolist()) == list(range(3000))

    def waste(budget):
        padded = sum(lengths[batch].max() * len(batch) for batch in budget.plan())
        return padded / lengths.sum() - 1

    assert waste(bucketed) < 0.05 < 0.5 < waste(random_order)
    means = [lengths[batch].mean() for batch in bucketed.plan()]
    assert np.corrcoef(means[:-1], means[1:])[0, 1] < 0.3, "short and long batches are mixed"


def test_samples_without_a_place_are_refused_or_left_out(caplog):
    with pytest.raises(DataArgumentError, match=r"1 of 3 samples fit into no batch .* \(sample 1 has 9 tokens\)"):
        TokenBudget([2, 9, 2], 5).plan()
    plan = TokenBudget([2, 9, 2], 5, too_long="drop").plan()
    assert plan.left_out.tolist() == [1] and "are left out" in caplog.text
    few = TokenBudget([5, 1, 1, 5], 5, min_batch_size=2, too_long="drop").plan()
    assert [b.tolist() for b in few] == [[1, 2]] and few.left_out.tolist() == [0, 3]
    for wrong, text in (
        ({"max_tokens": 0}, "at least 1"), ({"max_tokens": 5, "order": "x"}, "expected one of dataloader"),
        ({"max_tokens": 5, "max_batch_size": 2, "min_batch_size": 3}, "max_batch_size: got 2"),
        ({"max_tokens": 5, "cost": "x"}, "'sum' or 'padded'"),
    ):  # fmt: skip
        with pytest.raises(DataArgumentError, match=text):
            TokenBudget([1], **wrong)


def loaders(lengths, world, *, state=None, workers=0, **options):
    made = []
    for rank in range(world):
        budget = TokenBudget(lengths, 60, order="random")
        one = TrainingLoader(
            list(range(len(lengths))),
            LoaderOptions(1, rank=rank, world_size=world, budget=budget, num_workers=workers, **options),
        )
        if state is not None:
            one.load_state_dict(state)
        made.append(one)
    return made


@pytest.mark.parametrize("workers", [0, 2])
def test_two_then_three_then_one_rank_use_every_sample_once(workers):
    lengths = np.random.default_rng(0).integers(5, 30, 100).tolist()
    used, state = [], None
    for world, steps in ((2, 3), (3, 4), (1, None)):
        made = loaders(lengths, world, state=state, workers=workers)
        for number, group in enumerate(zip(*made, strict=True)):
            for batch in group:
                assert sum(lengths[i] for i in batch.tolist()) <= 60
                used += batch.tolist()
            state = made[0].state_dict()
            if steps is not None and number + 1 == steps:
                break
    assert sorted(used) == list(range(100))
    with pytest.raises(DataStateError, match="token budget, the lengths or the order"):
        loaders(lengths[::-1], 1, state=state)


def test_the_loader_says_how_many_samples_all_ranks_take():
    lengths = np.random.default_rng(0).integers(5, 30, 40).tolist()
    made = loaders(lengths, 3)
    counted = []
    made[0].on_batch = counted.append
    sizes = [[len(batch) for batch in group] for group in zip(*made)]
    plan = TokenBudget(lengths, 60, order="random").plan()
    last = len(plan) % 3 or 3
    expected = [sum(group) for group in sizes[:-1]] + [sum(sizes[-1][:last])]
    assert [size.samples for size in counted] == expected and sum(expected) == 40
    for size, group in zip(counted, sizes, strict=True):
        assert (size.own_samples, size.sum_samples) == (group[0], sum(group)), "also of batches that were repeated"
    assert len(made[0]) == len(sizes)
    dropped = loaders(lengths, 3, drop_last=True)
    assert {len(list(one)) for one in dropped} == {len(plan) // 3}
    with pytest.raises(DataArgumentError, match="got 40 lengths, expected 7"):
        TrainingLoader(list(range(7)), LoaderOptions(1, budget=TokenBudget(lengths, 60)))


def test_learning_rates_follow_the_batch():
    assert lr_factor(8, 32, "NONE") == lr_factor(8, 32, None) == 1.0, "DeepSpeed's scale_lr takes both for none"
    assert lr_factor(8, 32, "linear") == 0.25 and lr_factor(8, 32, "sqrt") == 0.5 and lr_factor(8, 32, "none") == 1.0
    with pytest.raises(DataArgumentError, match="expected 'linear'"):
        lr_factor(8, 32, "cubic")
