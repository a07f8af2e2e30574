"""The three tuners and early stopping, on spaces whose best point is known; proposals are functions of the history."""

from __future__ import annotations

import math
import random

import pytest
from dsx_plan.autotuning.space import Candidate
from dsx_plan.autotuning.surrogate import SPREADS, believe, distance, expected_improvement
from dsx_plan.autotuning.tuners import Limits, Measured, Stop, make_tuner, since_best

FREE = Limits(trials=10**6, patience=0)


def grid(stages=(0, 1, 2, 3), micro=(1, 2, 4, 8), steps=(1, 2)):
    return [Candidate(s, m, g) for s in stages for m in micro for g in steps]


def search(tuner, truth, *, fails=lambda one: False, steps=10**4):
    history = []
    for _ in range(steps):
        proposal = tuner.propose(tuple(history))
        if isinstance(proposal, Stop):
            return history, proposal
        assert proposal not in {one.candidate for one in history}
        failed = fails(proposal)
        history.append(Measured(proposal, None if failed else truth(proposal), out_of_memory=failed))
    raise AssertionError("the tuner does not stop")


def predicted(candidates, rule):
    return {one: rule(one) for one in candidates}


def smooth(one):
    """Samples per second that saturate with the batch; higher stages are slower."""
    return 100 * one.micro / (one.micro + 2) * (1 - 0.05 * one.stage) * (1 - 0.2 / one.steps)


@pytest.mark.parametrize("kind", ["gridsearch", "random"])
def test_in_order_visits_everything_once_and_stage_by_stage(kind):
    candidates = grid()
    history, _ = search(make_tuner(kind, candidates, {}, FREE), smooth)
    visited = [one.candidate for one in history]
    assert sorted(visited) == sorted(candidates)
    assert [one.stage for one in visited] == sorted(one.stage for one in visited)
    assert (visited == sorted(candidates)) == (kind == "gridsearch")


def test_random_is_the_same_in_every_run():
    orders = [search(make_tuner("random", grid(), {}, FREE), smooth)[0] for _ in range(2)]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("kind", ["gridsearch", "random", "model_based"])
def test_no_stage_has_more_trials_than_allowed(kind):
    candidates = grid()
    history, _ = search(make_tuner(kind, candidates, predicted(candidates, smooth), Limits(3, 0)), lambda one: 1.0)
    assert all(sum(one.candidate.stage == stage for one in history) <= 3 for stage in range(4))


def test_early_stopping_in_order_counts_within_a_stage():
    falling = lambda one: 1 / (one.micro * one.steps)  # noqa: E731
    history, _ = search(make_tuner("gridsearch", grid(), {}, Limits(10**6, 3)), falling)
    for stage in range(4):
        assert sum(one.candidate.stage == stage for one in history) == 1 + 3


def test_trials_since_the_best():
    assert since_best([]) == 0
    assert since_best([1.0, 3.0, 2.0, None]) == 2
    assert since_best([None, None]) == 2
    assert since_best([1.0, 1.0]) == 1, "an equal score is no progress"


@pytest.mark.parametrize("kind", ["gridsearch", "random", "model_based"])
def test_what_needs_more_than_something_that_ran_out_of_memory_is_not_tried(kind):
    candidates = grid()
    limit = lambda one: one.micro > 2 and one.stage < 2  # noqa: E731
    rule = lambda one: 1.0 + 0.001 * one.micro  # noqa: E731
    tuner = make_tuner(kind, candidates, predicted(candidates, rule), FREE)
    history, _ = search(tuner, rule, fails=limit)
    for index, one in enumerate(history):
        earlier = [past.candidate for past in history[:index] if past.out_of_memory]
        assert not any(one.candidate.stage == big.stage and one.candidate.micro >= big.micro for big in earlier)
    tried = {one.candidate for one in history}
    wanted = [one for one in candidates if one.micro <= 2 or one.stage >= 2]
    assert kind == "model_based" or tried >= set(wanted), "and nothing else is shut out"


def test_a_search_goes_on_where_it_was():
    candidates = grid()
    for kind in ("gridsearch", "random", "model_based"):
        limits = Limits(20, 5)
        whole, _ = search(make_tuner(kind, candidates, predicted(candidates, smooth), limits), smooth)
        for cut in range(len(whole)):
            again = make_tuner(kind, candidates, predicted(candidates, smooth), limits)
            assert again.propose(whole[:cut]) == whole[cut].candidate


def test_model_based_with_true_predictions_needs_few_trials():
    candidates = grid(micro=(1, 2, 4, 8, 16, 32), steps=(1, 2, 4))
    history, stop = search(make_tuner("model_based", candidates, predicted(candidates, smooth), Limits(50, 5)), smooth)
    assert history[0].candidate == max(candidates, key=smooth)
    assert len(history) <= 6 and stop.reason


@pytest.mark.parametrize("factor", [0.01, 1.0, 300.0])
def test_model_based_does_not_mind_predictions_that_are_wrong_by_one_factor(factor):
    candidates = grid()
    plain, _ = search(make_tuner("model_based", candidates, predicted(candidates, smooth), FREE), smooth)
    rule = lambda one: factor * smooth(one)  # noqa: E731
    scaled, _ = search(make_tuner("model_based", candidates, predicted(candidates, rule), FREE), smooth)
    assert [one.candidate for one in scaled] == [one.candidate for one in plain]


def test_model_based_finds_nearly_the_best_of_random_spaces_with_predictions_off_by_a_tenth():
    generator = random.Random(3)
    found = []
    for _ in range(60):
        candidates = grid(micro=(1, 2, 4, 8, 16), steps=(1, 2, 4))
        error = {stage: math.exp(generator.gauss(0, 0.1)) for stage in range(4)}
        truth = {one: smooth(one) * error[one.stage] * math.exp(generator.gauss(0, 0.02)) for one in candidates}
        tuner = make_tuner("model_based", candidates, predicted(candidates, smooth), Limits(50, 5))
        history, _ = search(tuner, truth.__getitem__)
        best_of_four = max(one.score for one in history[:4])
        found.append((best_of_four / max(truth.values()), len(history)))
    assert sorted(share for share, _ in found)[6] >= 0.95, "nine of ten spaces within four trials"
    assert sum(share >= 0.98 for share, _ in found) >= 45
    assert max(number for _, number in found) <= 20


def test_beliefs_agree_with_a_plain_computation():
    import torch

    candidates = grid(steps=(1,))[:10]
    rule, truth = predicted(candidates, smooth), {one: 1.3 * smooth(one) + one.stage for one in candidates[:5]}
    beliefs = believe(truth, rule, candidates)
    seen = list(truth)
    error = torch.tensor([math.log(truth[one] / rule[one]) for one in seen], dtype=torch.float64)

    def kernel(rows, columns, spread):
        distances = torch.tensor([[distance(a, b) for b in columns] for a in rows], dtype=torch.float64)
        return 100.0 + spread**2 * torch.exp(-distances / 2)

    def likelihood(spread):
        covariance = kernel(seen, seen, spread) + 4e-4 * torch.eye(len(seen), dtype=torch.float64)
        return torch.distributions.MultivariateNormal(torch.zeros(len(seen), dtype=torch.float64), covariance).log_prob(
            error
        )

    spread = max(SPREADS, key=likelihood)
    covariance = kernel(seen, seen, spread) + 4e-4 * torch.eye(len(seen), dtype=torch.float64)
    cross = kernel(candidates, seen, spread)
    means = cross @ torch.linalg.solve(covariance, error)
    variances = torch.diagonal(kernel(candidates, candidates, spread) - cross @ torch.linalg.solve(covariance, cross.T))
    for one, mean, variance in zip(candidates, means.tolist(), variances.tolist()):
        assert beliefs[one].mean == pytest.approx(math.log(rule[one]) + mean, abs=1e-9)
        assert beliefs[one].deviation == pytest.approx(math.sqrt(max(variance, 0.0)), abs=1e-6)


def test_expected_improvement_agrees_with_sampling():
    from dsx_plan.autotuning.surrogate import Belief

    generator = random.Random(0)
    for mean, deviation in ((0.1, 0.2), (-0.3, 0.2), (0.0, 0.05)):
        sampled = [max(0.0, generator.gauss(mean, deviation) - math.log(1.1)) for _ in range(200_000)]
        assert expected_improvement(Belief(mean, deviation), 1.1) == pytest.approx(
            sum(sampled) / len(sampled), abs=2e-3
        )
    assert expected_improvement(Belief(1.0, 0.0), math.e) == 0.0
    assert expected_improvement(Belief(2.0, 0.0), math.e) == pytest.approx(1.0)


def test_distance_is_a_metric_on_random_candidates():
    generator = random.Random(2)
    some = [
        Candidate(generator.randrange(4), 2 ** generator.randrange(6), 2 ** generator.randrange(4),
                  (("a", str(generator.randrange(3))),))
        for _ in range(40)
    ]  # fmt: skip
    for a, b, c in zip(some, some[1:], some[2:]):
        assert distance(a, a) == 0 and distance(a, b) == distance(b, a) >= 0
        assert distance(a, c) <= distance(a, b) + distance(b, c) + 1e-12
