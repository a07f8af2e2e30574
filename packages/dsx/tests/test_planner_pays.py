"""Whether settings that send less save time is planned, with and without them; a start of a job measures nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from dsx_plan import Machine, Plan, plan, search
from dsx_plan.page import plan_page
from dsx_plan.text import describe_plan
from dsx_testkit import run_ranks
from torch import nn

SLOW = Machine.of("H100-SXM+ethernet-10")
FREE = replace(
    SLOW, name="links that take no time", link_bandwidth=1e18, network_bandwidth=1e18,
    constants=replace(SLOW.constants, message_seconds=0.0),
)  # fmt: skip
ZERO_PLUS_PLUS = {
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zero_quantized_error_feedback": True,
    "zero_hpz_partition_size": 8,
}
NAMES = ["zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size"]


def make():
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(2)))


def settings(**zero):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }


def planned(config, machine=SLOW, **more):
    return plan(make, config, world_size=16, machine=machine, batch=torch.zeros(4, 64), **more)


def test_each_setting_is_held_against_the_plan_without_it():
    answer = planned(settings(**ZERO_PLUS_PLUS))
    assert [change.what for change in answer.without] == [f"zero_optimization.{name}" for name in NAMES]
    left = {key: value for key, value in ZERO_PLUS_PLUS.items() if "gradients" not in key and "feedback" not in key}
    without = planned(settings(**left), changes=False)
    change = answer.without[1]
    assert (change.step_seconds, change.peak_bytes) == (without.step_seconds, without.peak_bytes)
    assert without.step_seconds > answer.step_seconds, "10 Gbit/s between the hosts"
    text = describe_plan(answer)
    assert "zero_optimization.zero_quantized_gradients saves " in text and " a step (" in text
    assert "zero_optimization.zero_quantized_gradients saves" in plan_page(answer)
    assert Plan.from_json(answer.to_json()) == answer


def test_where_links_take_no_time_quantising_costs_some():
    answer = planned(settings(zero_quantized_weights=True), FREE)
    (change,) = answer.without
    assert change.step_seconds < answer.step_seconds
    assert "zero_optimization.zero_quantized_weights saves no time: it costs" in describe_plan(answer)
    assert not any("no rule says" in note for note in answer.notes), "bytes are what these kernels cost"


def test_only_what_was_asked_for_is_planned_twice():
    plain = {**settings(zero_quantized_gradients=False, zero_hpz_partition_size=1)}
    assert planned(plain).without == []
    assert planned(settings(**ZERO_PLUS_PLUS), changes=False).without == []
    found = search(
        make, settings(zero_quantized_weights=True), {"train_micro_batch_size_per_gpu": [2, 4]}, world_size=16,
        machine=SLOW, batch=torch.zeros(4, 64),
    )  # fmt: skip
    assert [one.without for one in found] == [[], []]


def test_a_setting_that_another_one_needs_is_left_out():
    bits = settings(zero_quantized_weights=True, zero_quantized_weights_bits=2, zero_hpz_partition_size=8)
    assert [change.what for change in planned(bits).without] == ["zero_optimization.zero_quantized_weights"]


def one_bit(kind, **params):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": kind, "params": {"lr": 1e-3, **params}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 0},
    }


@pytest.mark.parametrize(
    ("kind", "key"), [("OneBitAdam", "freeze_step"), ("OneBitLamb", "freeze_step"), ("ZeroOneAdam", "var_freeze_step")]
)
def test_a_one_bit_optimizer_is_planned_in_a_compressed_step(kind, key):
    config = one_bit(kind, **{key: 1000})
    answer = planned(config)
    assert "compressed_all_reduce" in answer.messages and any(f"behind {key}" in note for note in answer.notes)
    (change,) = answer.without
    assert change.what == f"optimizer.type {kind}" and change.config == {"optimizer.params.compression": "off"}
    exact = planned(one_bit(kind, **{key: 1000, "compression": "off"}))
    assert change.step_seconds == exact.step_seconds and exact.without == []
    assert "compressed_all_reduce" not in exact.messages and exact.sent_bytes > 10 * answer.sent_bytes
    assert answer.config == config, "as it was given"


def trained(rank, world, config):
    import dsx
    import dsx_comm

    torch.manual_seed(0)
    engine, *_ = dsx.initialize(model=make(), config=json.loads(json.dumps(config)))
    for step in range(4):
        with dsx_comm.count_traffic() as traffic:
            engine.backward(engine(torch.ones(4, 64)).square().mean())
            engine.step()
    found = {op: sent for op, (_, sent) in traffic.by_op().items()}
    engine.destroy()
    return found


def test_the_bytes_of_a_compressed_step_are_those_of_a_job():
    config = one_bit("OneBitAdam", freeze_step=2)
    answer = plan(make, config, world_size=2, machine=Machine.of_this_host(), batch=torch.zeros(4, 64))
    for found in run_ranks(trained, 2, config):
        assert found["compressed_all_reduce"] == answer.messages["compressed_all_reduce"][1]
