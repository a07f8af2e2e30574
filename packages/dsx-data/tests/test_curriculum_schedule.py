"""Difficulty schedules against the published formulas in plain Python."""

import math
import random

import pytest
from dsx_data import CurriculumScheduler
from dsx_data.errors import DataArgumentError


def config(kind, low, high, **numbers):
    return {"min_difficulty": low, "max_difficulty": high, "schedule_type": kind, "schedule_config": numbers}


@pytest.mark.parametrize("seed", range(20))
def test_linear_and_root_are_the_formula(seed):
    draw = random.Random(seed)
    low = draw.randrange(0, 200)
    high, total, step = low + draw.randrange(0, 2000), draw.randrange(1, 300), draw.randrange(1, 70)
    degree = draw.choice([1, 2, 3, 4, 1.5, 0.5])
    linear = CurriculumScheduler(config("fixed_linear", low, high, total_curriculum_step=total, difficulty_step=step))
    root = CurriculumScheduler(
        config("fixed_root", low, high, total_curriculum_step=total, difficulty_step=step, root_degree=degree)
    )
    for scheduler, power in ((linear, 1.0), (root, 1.0 / degree)):
        reached = low
        for t in range(1, 2 * total):
            d = math.floor((t / total) ** power * (high - low) + low)
            d = max(low, min(d - d % step, high))
            reached = d if reached < high else reached
            assert scheduler.get_difficulty(t) == d
            assert scheduler.update_difficulty(t) == reached == scheduler.get_current_difficulty()
            assert low <= reached <= high


def test_discrete_takes_the_first_step_that_is_not_passed():
    scheduler = CurriculumScheduler(config("fixed_discrete", 1, 9, difficulty=[1, 5, 9], max_step=[3, 6]))
    assert [scheduler.update_difficulty(t) for t in range(1, 9)] == [1, 1, 1, 5, 5, 5, 9, 9]


def test_custom_asks_the_function_until_the_maximum():
    scheduler = CurriculumScheduler(config("custom", 1, 4))
    with pytest.raises(DataArgumentError, match="set_custom_curriculum_learning_schedule"):
        scheduler.update_difficulty(1)
    scheduler.set_custom_get_difficulty({1: 2, 2: 4, 3: 1}.get)
    assert [scheduler.update_difficulty(t) for t in (1, 2, 3)] == [2, 4, 4], "at the maximum it stays"


def test_state_goes_on():
    one = CurriculumScheduler(config("fixed_linear", 0, 100, total_curriculum_step=10, difficulty_step=1))
    one.update_difficulty(4)
    other = CurriculumScheduler(config("fixed_linear", 0, 100, total_curriculum_step=10, difficulty_step=1))
    other.load_state_dict(one.state_dict())
    assert other.get_current_difficulty() == 40 and other.update_difficulty(5) == one.update_difficulty(5)


@pytest.mark.parametrize(
    "broken, named",
    [
        (config("fixed_linear", 9, 3, total_curriculum_step=1, difficulty_step=1), "max_difficulty: got 3"),
        (config("fixed_linear", 1, 3, difficulty_step=1), "total_curriculum_step: got None"),
        *(
            (
                config("fixed_root", 1, 3, total_curriculum_step=1, difficulty_step=1, root_degree=degree),
                f"root_degree: got {degree}, expected a number above 0",
            )
            for degree in (None, 0, -1.5, float("nan"), float("inf"), True)
        ),
        (
            config("fixed_discrete", 1, 3, difficulty=[1, 2, 3], max_step=[5]),
            "max_step: got \\[5\\], expected a list of 2",
        ),
        (config("fixed_discrete", 1, 3, difficulty=[1, 2, 3], max_step=[5, 5]), "increasing"),
        (config("cosine", 1, 3), "schedule_type: got 'cosine'"),
        ({"min_difficulty": 1, "schedule_type": "custom"}, "max_difficulty: got None"),
    ],
)
def test_what_is_missing_is_named(broken, named):
    with pytest.raises(DataArgumentError, match=named):
        CurriculumScheduler(broken)
    with pytest.raises(DataArgumentError, match="its schedule_type is 'fixed_discrete'"):
        CurriculumScheduler(config("fixed_discrete", 1, 2, difficulty=[1], max_step=[])).set_custom_get_difficulty(max)
