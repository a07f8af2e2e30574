"""What will fit and how fast it will be: the planner's figure corrected by one measurement, and the formula alone."""

from __future__ import annotations

import dataclasses

import pytest
from dsx_plan.autotuning.predictions import (
    HEADROOM,
    Facts,
    fitting,
    largest_micro_batches,
    predict,
    score_of,
)
from dsx_plan.autotuning.space import Candidate

MIB = 2**20
START = Candidate(0, 2, 1)
FACTS = Facts(
    num_params=1000, trainable_num_params=800, activation_mem_per_gpu=4000, peak_bytes=100_000, memory_bytes=200_000,
    device="cuda", world_size=4, data_parallel=4, ranks_per_host=4, sixteen_bit=True,
    step_seconds=2.0, pass_seconds=1.5,
)  # fmt: skip


def test_facts_survive_json():
    assert Facts.from_json({**FACTS.to_json(), "further": 1}) == FACTS


def test_the_formula_gives_the_first_experiment_back():
    found = predict([START], START, FACTS, {})[START]
    assert (found.peak_bytes, found.step_seconds, found.source) == (100_000, 2.0, "formula")


@pytest.mark.parametrize(
    ("stage", "bytes_less"),
    [
        (1, 16 * 800 * 3 / 4),
        (2, (16 + 2) * 800 * 3 / 4),
        (3, (16 + 2) * 800 * 3 / 4 + 2 * 1000 * 3 / 4),
    ],
)
def test_the_formula_divides_states_by_stage(stage, bytes_less):
    one = Candidate(stage, 2, 1)
    assert predict([one], START, FACTS, {})[one].peak_bytes == 100_000 - bytes_less
    plain = dataclasses.replace(FACTS, sixteen_bit=False)
    less = {1: 8 * 800, 2: (8 + 4) * 800, 3: (8 + 4) * 800 + 4 * 1000}[stage] * 3 / 4
    assert predict([one], START, plain, {})[one].peak_bytes == 100_000 - less


def test_the_formula_knows_offloaded_states():
    away = dataclasses.replace(FACTS, optimizer_offloaded=True)
    one = Candidate(1, 2, 1)
    assert predict([one], START, away, {})[one].peak_bytes == 100_000
    back = Candidate(1, 2, 1, (("zero_optimization.offload_optimizer.device", '"none"'),))
    assert predict([back], START, away, {})[back].peak_bytes == 100_000 + 16 * 800 / 4


def test_the_formula_grows_with_the_micro_batch():
    sizes = [Candidate(0, micro, 1) for micro in (1, 2, 4, 8)]
    found = predict(sizes, START, FACTS, {})
    assert [found[one].peak_bytes for one in sizes] == [98_000, 100_000, 104_000, 112_000]
    seconds = [found[one].step_seconds for one in sizes]
    assert seconds == sorted(seconds) and seconds[-1] < 4 * seconds[1]
    throughput = [score_of(one, found[one].step_seconds, 4, "throughput") for one in sizes]
    assert throughput == sorted(throughput)


def test_accumulation_repeats_the_passes_only():
    one = Candidate(0, 2, 3)
    assert predict([one], START, FACTS, {})[one].step_seconds == pytest.approx(0.5 + 3 * 1.5)
    assert predict([one], START, dataclasses.replace(FACTS, pass_seconds=None), {})[one].step_seconds == pytest.approx(
        6
    )


def test_the_planner_is_corrected_by_what_was_measured():
    one, other = Candidate(1, 4, 1), Candidate(2, 4, 1)
    found = predict([one, other, START], START, FACTS, {START: (70_000, 4.0), one: (90_000, 6.0)})
    assert (found[one].peak_bytes, found[one].step_seconds, found[one].source) == (120_000, 3.0, "planner")
    assert (found[START].peak_bytes, found[START].step_seconds) == (100_000, 2.0)
    assert found[other].source == "formula"


def test_without_a_plan_of_the_first_experiment_no_plan_is_used():
    one = Candidate(1, 4, 1)
    assert predict([one], START, FACTS, {one: (1, 1.0)})[one].source == "formula"


def test_what_will_fit_leaves_headroom():
    sizes = [Candidate(0, 2**power, 1) for power in range(8)]
    kept = fitting(predict(sizes, START, FACTS, {}), FACTS)
    assert kept == [one for one in sizes if 96_000 + 2000 * one.micro <= HEADROOM * 200_000]
    assert 0 < len(kept) < len(sizes)


def test_the_largest_micro_batches_of_each_group_stay():
    wide = [Candidate(stage, micro, steps) for stage in (0, 1) for micro in (1, 2, 4, 8) for steps in (1, 2)]
    found = [one for one in wide if one.stage or one.micro < 8]
    kept = largest_micro_batches(found, 2)
    assert {(one.stage, one.micro) for one in kept} == {(0, 2), (0, 4), (1, 4), (1, 8)}
    assert len(kept) == 8


def test_scores():
    one = Candidate(0, 3, 2)
    assert score_of(one, 0.5, 4, "latency") == 2.0
    assert score_of(one, 0.5, 4, "throughput") == score_of(one, 0.5, 4, "FLOPS") == 48.0
