"""The schedules against the published sequences, value by value."""

from __future__ import annotations

import itertools

import pytest
from dsx.lr_schedules import SCHEDULES, LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


class Groups:
    """An optimizer as far as a schedule is concerned."""

    def __init__(self, *lrs: float, **values: object) -> None:
        self.param_groups = [{"lr": lr, **values} for lr in lrs or (0.1,)]


GOLDEN = [
    (WarmupLR, {"warmup_max_lr": 0.1, "warmup_num_steps": 4}, [0, 0.05, 0.079248, 0.1, 0.1, 0.1]),
    (
        WarmupLR,
        {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0, 0.025, 0.05, 0.075, 0.1, 0.1],
    ),
    (
        WarmupDecayLR,
        {"total_num_steps": 8, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0, 0.025, 0.05, 0.075, 0.1, 0.075, 0.05, 0.025, 0, 0],
    ),
    (
        WarmupCosineLR,
        {"total_num_steps": 8, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0, 0.025, 0.05, 0.075, 0.085357, 0.050005, 0.014653, 1e-5, 1e-5, 1e-5],
    ),
    (
        LRRangeTest,
        {
            "lr_range_test_min_lr": 0.01,
            "lr_range_test_step_size": 2,
            "lr_range_test_step_rate": 1,
            "lr_range_test_staircase": True,
        },
        [0.01, 0.02, 0.02, 0.03, 0.03],
    ),
]


@pytest.mark.parametrize(("schedule", "params", "expected"), GOLDEN, ids=lambda item: getattr(item, "__name__", ""))
def test_each_step_gives_the_published_rate(schedule, params, expected):
    optimizer = Groups(0.1)
    built = schedule(optimizer, **params)
    seen = []
    for _ in expected:
        built.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx(expected, abs=5e-7)


ONE_CYCLE = {
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "cycle_first_step_size": 3,
    "decay_lr_rate": 0.5,
    "decay_step_size": 1,
}
ONE_CYCLE_VALUES = [
    (0.04, 0.8667), (0.07, 0.8333), (0.1, 0.8), (0.07, 0.8333), (0.04, 0.8667), (0.01, 0.9), (0.00667, 0.9),
    (0.005, 0.9), (0.004, 0.9),
]  # fmt: skip


def test_one_cycle_moves_rate_and_momentum_as_published():
    optimizer = Groups(0.1, betas=(0.9, 0.999))
    schedule = OneCycle(optimizer, **ONE_CYCLE)
    for lr, beta1 in ONE_CYCLE_VALUES:
        schedule.step()
        group = optimizer.param_groups[0]
        assert group["lr"] == pytest.approx(lr, abs=5e-6)
        assert group["betas"] == (pytest.approx(beta1, abs=5e-5), 0.999)


def test_the_second_beta_is_set_on_request():
    optimizer = Groups(0.1, betas=(0.9, 0.999))
    OneCycle(optimizer, **ONE_CYCLE, cycle_beta2=0.99).step()
    assert optimizer.param_groups[0]["betas"][1] == 0.99


def test_momentum_never_leaves_its_bounds_however_long_it_decays():
    optimizer = Groups(0.1, betas=(0.9, 0.999))
    schedule = OneCycle(optimizer, **ONE_CYCLE, decay_mom_rate=0.5)
    moments = []
    for _ in range(200):
        schedule.step()
        moments.append(optimizer.param_groups[0]["betas"][0])
    assert all(0 < moment <= 0.9 for moment in moments)
    assert moments[6] == pytest.approx(0.9 / 1.5)
    assert moments[5:] == sorted(moments[5:], reverse=True)


def test_one_cycle_stairs_begin_exactly_at_their_step():
    schedule = OneCycle(
        Groups(0.1), cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=10, cycle_first_stair_count=5
    )
    rates = [schedule.lr_at(iteration)[0] for iteration in range(20)]
    up = [0.0, 0.2, 0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8, 1.0]
    down = [0.8, 0.8, 0.6, 0.6, 0.4, 0.4, 0.2, 0.2, 0.0, 0.0]
    assert rates == pytest.approx(up + down)


def test_starting_at_the_first_value_gives_one_update_at_the_minimum():
    optimizer = Groups(1.0)
    schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear", start_at_first_value=True)
    used = []
    for _ in range(6):
        used.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert used == [0, 0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_resuming_from_a_state_continues_the_sequence(name):
    params = {
        "OneCycle": ONE_CYCLE,
        "WarmupDecayLR": {"total_num_steps": 9, "warmup_num_steps": 3},
        "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 3},
    }.get(name, {})
    whole, first, second = (Groups(0.3, 0.7, betas=(0.9, 0.99)) for _ in range(3))
    straight = SCHEDULES[name](whole, **params)
    rates = []
    for _ in range(8):
        straight.step()
        rates.append([group["lr"] for group in whole.param_groups])
    before = SCHEDULES[name](first, **params)
    for _ in range(4):
        before.step()
    # The groups of the resumed run carry the running rate already, as after loading an optimizer.
    for group, lr in zip(second.param_groups, rates[3], strict=True):
        group["lr"] = lr
    after = SCHEDULES[name](second, **params)
    after.load_state_dict(before.state_dict())
    assert [group["lr"] for group in second.param_groups] == rates[3]
    for expected in rates[4:]:
        after.step()
        assert [group["lr"] for group in second.param_groups] == expected
    assert after.last_batch_iteration == 7


def test_one_value_per_group():
    optimizer = Groups(0.1, 0.2)
    schedule = WarmupLR(
        optimizer, warmup_min_lr=[0.0, 1.0], warmup_max_lr=[1.0, 3.0], warmup_num_steps=2, warmup_type="linear"
    )
    seen = list(itertools.islice(rates_of(schedule), 3))
    assert seen == [[0.0, 1.0], [0.5, 2.0], [1.0, 3.0]]
    assert schedule.get_lr() == schedule.get_last_lr() == [1.0, 3.0]


def rates_of(schedule):
    while True:
        schedule.step()
        yield schedule.get_last_lr()
