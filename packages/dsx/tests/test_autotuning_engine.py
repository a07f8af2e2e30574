"""An engine that is told to measure: its figures are those of its updates, ranks end together, memory is bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import dsx
import pytest
import torch
from dsx_plan.autotuning.experiments import _NO_MEMORY
from dsx_testkit import run_ranks
from torch import nn

PAUSE = 0.04


def config(folder, *, facts=False, **more):
    section = {"enabled": True, "metric_path": f"{folder}/metrics.json", "start_profile_step": 2, "end_profile_step": 4}
    if facts:
        section |= {"model_info": {"profile": True}, "model_info_path": f"{folder}/model_info.json"}
    section |= more.pop("section", {})
    return {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "steps_per_print": 0,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}, "autotuning": section, **more}  # fmt: skip


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


def train(engine, updates=10, rank=0):
    """Each update sleeps where nothing but the clock from end to end can see it. Returns the updates that were made."""
    done = 0
    for _ in range(updates * engine.gradient_accumulation_steps()):
        loss = engine(torch.randn(2, 16)).square().mean()
        engine.backward(loss)
        engine.step()
        time.sleep(PAUSE / engine.gradient_accumulation_steps() * (1 + rank))
        done = engine.global_steps
    return done


def measure(rank, world, folder, given):
    engine, *_ = dsx.initialize(model=model(), config=given)
    began = time.perf_counter()
    with pytest.raises(SystemExit) as ended:
        train(engine, rank=rank)
    return ended.value.code, engine.global_steps, time.perf_counter() - began


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_measured(tmp_path, world, stage):
    given = config(tmp_path, zero_optimization={"stage": stage})
    found = run_ranks(measure, world, str(tmp_path), given)
    assert {(code, steps) for code, steps, _ in found} == {(0, 4)}, "all ranks end after the same update, well"
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    slowest = PAUSE * world  # what lies between updates counts, and the slowest rank's is the time of all
    assert slowest <= metrics["latency"] <= max(seconds for *_, seconds in found)
    assert metrics["throughput"] == pytest.approx(2 * 2 * world / metrics["latency"])
    assert metrics["updates"] == 3 and metrics["samples_per_update"] == 4 * world
    assert metrics["zero_stage"] == stage and metrics["train_batch_size"] == 4 * world
    phases = [metrics[name] for name in ("fwd", "bwd", "step")]
    assert all(seconds > 0 for seconds in phases) and sum(phases) <= metrics["latency"] * 1.5
    assert metrics["FLOPS_per_gpu"] is None and metrics["peak_bytes"] > 0
    assert (tmp_path / "started.json").exists()


def look(rank, world, folder, given):
    engine, *_ = dsx.initialize(model=model(), config=given)
    with pytest.raises(SystemExit):
        train(engine)


@pytest.mark.parametrize("world", [1, 2])
def test_facts_about_the_model(tmp_path, world):
    given = config(
        tmp_path, facts=True, zero_optimization={"stage": 3}, section={"metric": "FLOPS", "max_memory_per_gpu": 2**34}
    )
    run_ranks(look, world, str(tmp_path), given)
    facts = json.loads((tmp_path / "model_info.json").read_text())
    assert facts["num_params"] == facts["trainable_num_params"] == 16 * 32 + 32 + 32 + 1
    assert (facts["world_size"], facts["data_parallel"], facts["device"]) == (world, world, "cpu")
    assert facts["memory_bytes"] == 2**34 and facts["sixteen_bit"] is False and facts["optimizer_offloaded"] is False
    linear = 2 * (16 * 32 + 32)
    per_sample = facts["flops_per_sample"]
    assert 2 * linear <= per_sample <= 3 * linear, "forward, and backward without the input's gradient"
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["FLOPS_per_gpu"] == pytest.approx(per_sample * metrics["throughput"] / world)
    assert facts["step_seconds"] == metrics["latency"]


def trains_on(rank, world, given):
    engine, *_ = dsx.initialize(model=model(), config=given)
    return train(engine, updates=6)


def test_a_section_that_is_on_without_a_tuner_changes_nothing():
    given = config("", section={"metric_path": None})
    assert run_ranks(trains_on, 1, given) == [6]
    off = config("/nowhere", section={"enabled": False})
    assert run_ranks(trains_on, 1, off) == [6]


def test_the_first_update_may_be_measured(tmp_path):
    given = config(tmp_path, section={"start_profile_step": 1, "end_profile_step": 1})
    ((code, steps, _),) = run_ranks(measure, 1, str(tmp_path), given)
    assert (code, steps) == (0, 1)
    assert json.loads((tmp_path / "metrics.json").read_text())["updates"] == 1


def test_loops_that_call_backward_themselves_are_measured(tmp_path):
    run_ranks(by_hand, 1, config(tmp_path))
    assert json.loads((tmp_path / "metrics.json").read_text())["updates"] == 3


def by_hand(rank, world, given):
    engine, *_ = dsx.initialize(model=model(), config=given)
    with pytest.raises(SystemExit):
        for _ in range(40):
            engine(torch.randn(2, 16)).square().mean().backward()
            engine.step()


GREEDY = """
import sys, torch, dsx
model = torch.nn.Linear(8, 1)
engine, *_ = dsx.initialize(model=model, config=sys.argv[1], dist_init_required=False)
for _ in range(10):
    engine.backward(engine(torch.randn(2, 8)).mean())
    engine.step()
    held = [torch.ones(2**20) for _ in range(int(sys.argv[2]))]
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel bounds memory on Linux only")
def test_memory_is_bounded(tmp_path):
    (tmp_path / "greedy.py").write_text(GREEDY)
    given = config(tmp_path, gradient_accumulation_steps=1, section={"max_memory_per_gpu": 1200 * 2**20})
    (tmp_path / "dsx.json").write_text(json.dumps(given))

    def run(mebibytes):
        command = [sys.executable, str(tmp_path / "greedy.py"), str(tmp_path / "dsx.json"), str(mebibytes // 4)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)

    assert run(64).returncode == 0 and (tmp_path / "metrics.json").exists()
    (tmp_path / "metrics.json").unlink()
    failed = run(3000)
    assert failed.returncode == 1 and _NO_MEMORY.search(failed.stderr), "the tuner knows it for what it is"
    assert not (tmp_path / "metrics.json").exists()


def test_the_planner_is_asked_with_batches_of_each_size():
    from dsx_plan.autotuning.probe import Probe

    asked = []

    class Plan:
        peak_bytes, step_seconds = 10, 0.5

    def plan(model, config, *, world_size, batch, changes):
        assert not changes
        inputs, rest = batch["x"], batch
        asked.append((config["name"], world_size, tuple(inputs.shape), tuple(rest["mask"].shape), inputs.device.type))
        if config["name"] == "broken":
            raise ValueError("cannot be traced")
        if config["name"] == "big":
            Plan.peak_bytes = 10**9
        return Plan

    batch = {"x": torch.empty(3, 5, device="meta"), "mask": torch.empty(5, 5, device="meta")}
    probe = Probe(nn.Linear(5, 1), batch, 3, 4, 10**6, plan)
    questions = [
        {"key": "a", "config": {"name": "fine"}, "micro": 2, "group": "1"},
        {"key": "b", "config": {"name": "broken"}, "micro": 3, "group": "1"},
        {"key": "c", "config": {"name": "big"}, "micro": 8, "group": "2"},
        {"key": "d", "config": {"name": "bigger"}, "micro": 16, "group": "2"},
    ]
    answer = probe.answer(questions)
    assert asked == [
        ("fine", 4, (2, 5), (5, 5), "meta"),
        ("broken", 4, (3, 5), (5, 5), "meta"),
        ("big", 4, (8, 5), (5, 5), "meta"),
    ]
    assert answer["plans"] == {"a": [10, 0.5], "c": [10**9, 0.5], "d": [10**9, 0.5]}
    assert answer["reason"] == "ValueError: cannot be traced"


def test_a_planner_that_always_fails_is_not_asked_for_ever():
    from dsx_plan.autotuning.probe import FAILURES, Probe

    calls = []

    def plan(model, config, *, world_size, batch, changes):
        calls.append(config)
        raise RuntimeError("no")

    questions = [{"key": str(i), "config": {}, "micro": 1, "group": str(i)} for i in range(20)]
    answer = Probe(nn.Linear(1, 1), (), 1, 1, 1, plan).answer(questions)
    assert len(calls) == FAILURES and answer == {"plans": {}, "reason": "RuntimeError: no"}


def test_a_skeleton_keeps_ties_and_frozen_parameters_and_holds_no_values():
    from dsx_plan.trials import _skeleton_of

    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    tied[1].weight = tied[0].weight
    tied[0].bias.requires_grad_(False)
    copied = _skeleton_of(tied)
    assert isinstance(copied, nn.Module)
    assert copied[1].weight is copied[0].weight and not copied[0].bias.requires_grad
    assert {t.device.type for t in (*copied.parameters(), *copied.buffers())} == {"meta"}
    assert copied[2].num_batches_tracked.dtype == torch.int64
    assert tied[0].weight.device.type == "cpu"
    tied.lock = __import__("threading").Lock()
    assert "cannot be copied" in _skeleton_of(tied)
