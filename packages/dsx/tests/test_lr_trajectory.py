"""The rate of every update under the engine equals, to the last bit, what DeepSpeed's engine gives.

The numbers were recorded from DeepSpeed 0.19.8: an engine on CPU, Adam with rate 0.1, the rate read before each update.
"""

import pytest
import torch
from dsx.errors import ScheduleError
from dsx.lr_schedules import SCHEDULES, OneCycle, WarmupCosineLR, WarmupLR

RECORDED = [
    (
        "WarmupLR",
        {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0.0, 0.0, 0.025, 0.05, 0.07500000000000001, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
    ),
    (
        "WarmupLR",
        {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 4},
        [0.01, 0.01, 0.05500000000000001, 0.08132331253245204, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
    ),
    (
        "WarmupLR",
        {"warmup_num_steps": 4},
        [0.0, 0.0, 0.05, 0.07924812503605783, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 8, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0.0, 0.0, 0.025, 0.05, 0.07500000000000001, 0.1, 0.07500000000000001, 0.05, 0.025, 0.0, 0.0, 0.0],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 8, "warmup_num_steps": 3},
        [0.0, 0.0, 0.0006309297535714573, 0.001, 0.001, 0.0008, 0.0006, 0.0004, 0.0002, 0.0, 0.0, 0.0],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 8, "warmup_num_steps": 4, "warmup_min_ratio": 0.1},
        [
            0.0,
            0.010000000000000002,
            0.05500000000000001,
            0.08132331253245204,
            0.1,
            0.08535680352542145,
            0.050005,
            0.014653196474578559,
            1e-05,
            1e-05,
            1e-05,
            1e-05,
        ],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2},
        [0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.055, 0.06, 0.065],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
        [0.01, 0.01, 0.02, 0.02, 0.03, 0.03, 0.04, 0.04, 0.05, 0.05, 0.06, 0.06],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 3,
            "decay_lr_rate": 0.5,
            "decay_step_size": 1,
        },
        [
            0.01,
            0.040000000000000015,
            0.06999999999999999,
            0.1,
            0.07000000000000003,
            0.03999999999999998,
            0.01,
            0.006666666666666667,
            0.005,
            0.004,
            0.0033333333333333335,
            0.002857142857142857,
        ],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 4,
            "cycle_first_stair_count": 2,
            "cycle_second_step_size": 3,
            "decay_lr_rate": 0.5,
            "decay_step_size": 2,
        },
        [
            0.01,
            0.01,
            0.05500000000000001,
            0.05500000000000001,
            0.1,
            0.05500000000000001,
            0.01,
            0.01,
            0.008,
            0.006666666666666667,
            0.005714285714285714,
            0.005,
        ],
    ),
]


def engine_of(schedule):
    import dsx

    settings = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.85, 0.95]}},
        "scheduler": schedule,
        "steps_per_print": None,
    }
    return dsx.initialize(model=torch.nn.Linear(2, 1), config=settings)[0]


def updates(engine, count):
    for _ in range(count):
        yield engine.optimizer.param_groups[0]
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()


@pytest.mark.parametrize(("name", "params", "recorded"), RECORDED)
def test_every_update_runs_at_the_recorded_rate(name, params, recorded):
    engine = engine_of({"type": name, "params": params})
    assert [group["lr"] for group in updates(engine, len(recorded))] == recorded


@pytest.mark.parametrize(("name", "params", "recorded"), RECORDED)
def test_a_loop_of_the_users_own_sees_the_same_rates(name, params, recorded):
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    schedule = SCHEDULES[name](optimizer, **params)
    used = []
    for _ in recorded:
        used.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert used == recorded


@pytest.mark.parametrize(("name", "params", "recorded"), RECORDED)
def test_the_earlier_start_leaves_out_the_first_value_only(name, params, recorded):
    engine = engine_of({"type": name, "params": {**params, "start_at_first_value": True}})
    assert [group["lr"] for group in updates(engine, 8)] == recorded[1:9]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_rate_that_is_a_tensor_stays_this_tensor(name):
    params = next(params for known, params, _ in RECORDED if known == name)
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=rate)
    held = optimizer.param_groups[0]["lr"]
    schedule = SCHEDULES[name](optimizer, **params)
    for _ in range(3):
        schedule.step()
        assert optimizer.param_groups[0]["lr"] is held
        assert float(held) == pytest.approx(schedule.lr_at(schedule.last_batch_iteration)[0], rel=1e-12)


def test_the_second_beta_stays_the_users():
    engine = engine_of({"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}})
    assert {group["betas"][1] for group in updates(engine, 4)} == {0.95}


def test_momentum_ends_may_be_given_per_group():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]}, {"params": [torch.nn.Parameter(torch.zeros(1))]}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    schedule = OneCycle(
        optimizer, [0.1, 0.2], [1.0, 2.0], cycle_first_step_size=2, cycle_min_mom=[0.7, 0.8], cycle_max_mom=[0.9, 0.95]
    )
    schedule.step()
    assert [group["betas"][0] for group in optimizer.param_groups] == pytest.approx([0.8, 0.875])
    with pytest.raises(ScheduleError, match="cycle_min_mom: got 1 values for 2 parameter groups"):
        OneCycle(optimizer, 0.1, 1.0, cycle_min_mom=[0.7])


def test_a_second_half_of_no_steps_falls_at_once():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = OneCycle(optimizer, 0.0, 1.0, cycle_first_step_size=4, cycle_second_step_size=0)
    assert [schedule.lr_at(it)[0] for it in range(-1, 5)] == [0.0, 0.25, 0.5, 0.75, 0.0, 0.0]


@pytest.mark.parametrize("steps", [-1, -5, 1.5, "4", True])
def test_a_warm_up_of_no_steps_to_count_is_refused_before_the_optimizer_changes(steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.raises(ScheduleError, match="warmup_num_steps"):
        WarmupLR(optimizer, warmup_num_steps=steps)
    with pytest.raises(ScheduleError, match="warmup_num_steps"):
        WarmupCosineLR(optimizer, 10, warmup_num_steps=steps)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_warm_up_of_zero_steps_takes_two_as_programs_that_write_zero_expect():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    assert WarmupLR(optimizer, warmup_num_steps=0).warmup.steps == 2
