"""Building schedules by name, refusing wrong arguments, and the options of the command line."""

from __future__ import annotations

import argparse

import pytest
import torch
from dsx.errors import ScheduleError
from dsx.lr_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_schedule,
)
from dsx_compat.arguments import add_config_arguments
from dsx_compat.lr_arguments import (
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_1cycle_params,
    override_lr_range_test_params,
    override_warmupLR_params,
    parse_arguments,
)


def optimizer(*lrs):
    parameters = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": lr} for lr in (lrs or (0.1,))]
    return torch.optim.SGD(parameters, lr=0.1)


def test_ours_are_found_in_any_case_and_torchs_by_name():
    assert type(build_schedule("warmuplr", optimizer(), {"warmup_num_steps": 5})) is WarmupLR
    step = build_schedule("StepLR", optimizer(), {"step_size": 2})
    assert type(step) is torch.optim.lr_scheduler.StepLR
    with pytest.raises(ScheduleError, match="'NoSuchLR' is unknown; expected LRRangeTest"):
        build_schedule("NoSuchLR", optimizer())
    with pytest.raises(ScheduleError, match="StepLR"):
        build_schedule("StepLR", optimizer(), {"step": 2})


WRONG = [
    (WarmupLR, {"warmup_type": "cubic"}, "'log' or 'linear'"),
    (WarmupLR, {"warmup_max_lr": [0.1, 0.2]}, "2 values for 1 parameter groups"),
    (WarmupLR, {"warmup_max_lr": "high"}, "expected a number"),
    (WarmupLR, {"warmup_min_lr": float("nan")}, "expected a number"),
    (WarmupDecayLR, {"total_num_steps": 0}, "at least 1"),
    (WarmupCosineLR, {"total_num_steps": 2.5}, "integer of at least"),
    (LRRangeTest, {"lr_range_test_step_size": 0}, "at least 1"),
    (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": True}, "expected a number"),
    (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "at least 1"),
]


@pytest.mark.parametrize(("schedule", "params", "message"), WRONG)
def test_wrong_arguments_are_named(schedule, params, message):
    with pytest.raises(ScheduleError, match=message):
        schedule(optimizer(), **params)


def test_momentum_bounds_are_checked():
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(ScheduleError, match="0 <= min <= max < 1"):
        OneCycle(adam, 0.1, 1.0, cycle_min_mom=0.95, cycle_max_mom=0.9)


def test_something_without_groups_is_refused():
    with pytest.raises(ScheduleError, match="param_groups"):
        WarmupLR(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_schedules_drive_a_torch_optimizer():
    inner = optimizer(0.1, 0.2)
    schedule = WarmupCosineLR(inner, total_num_steps=4, warmup_num_steps=2, warmup_type="linear")
    schedule.step()
    assert [group["lr"] for group in inner.param_groups] == [0.0, 0.0]
    for _ in range(6):
        inner.step()
        schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.1 * 1e-4, 0.2 * 1e-4])


def test_a_counter_can_be_set():
    schedule = WarmupLR(optimizer(), warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    schedule.step(3)
    assert schedule.get_last_lr() == [0.75]
    assert schedule.state_dict() == {"last_batch_iteration": 3}


def test_options_become_a_scheduler_section():
    parser = add_tuning_arguments(argparse.ArgumentParser())
    args = parser.parse_args(
        ["--lr_schedule", "OneCycle", "--cycle_min_lr", "0.01", "--cycle_max_lr", "0.1", "--cycle_momentum", "false"]
    )
    section, reason = get_config_from_args(args)
    assert reason is None
    assert section == {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_momentum": False},
    }
    assert type(build_schedule(section["type"], optimizer(), section["params"])) is OneCycle
    assert get_lr_from_config(section) == (0.1, "")


def test_without_a_choice_there_is_no_section():
    args, rest = parse_arguments(["--warmup_num_steps", "7", "--other", "1"])
    assert rest == ["--other", "1"]
    section, reason = get_config_from_args(args)
    assert section is None and "--lr_schedule" in reason
    params = {"warmup_min_lr": 0.5, "warmup_num_steps": 3}
    override_warmupLR_params(args, params)
    assert params == {"warmup_min_lr": 0.5, "warmup_num_steps": 7}
    for override in (override_1cycle_params, override_lr_range_test_params):
        untouched: dict[str, object] = {}
        override(args, untouched)
        assert untouched == {}


@pytest.mark.parametrize(
    ("section", "lr"),
    [
        ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.3}}, 0.3),
        ({"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.2}}, 0.2),
        ({"type": "WarmupLR", "params": {}}, None),
        ({"type": "WarmupCosineLR", "params": {}}, None),
        ({"type": "WarmupLR"}, None),
        ({}, None),
    ],
)
def test_the_rate_of_a_section(section, lr):
    found, reason = get_lr_from_config(section)
    assert found == lr
    assert bool(reason) is (lr is None)


def test_options_of_a_training_script(capsys):
    parser = add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "dsx.json"])
    assert args.deepspeed is True and args.deepspeed_config == "dsx.json"
    assert parser.parse_args(["--dsx_config", "a.json"]).deepspeed_config == "a.json"
    assert parser.parse_args(["--deepscale_config", "b.json"]).deepscale_config == "b.json"
    assert parser.parse_args([]).deepspeed_config is None
    assert "deepscale" not in parser.format_help()
