"""Which configurations are tried: what numbers, lists, "auto" and nothing mean, and that bounds hold everywhere."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from dsx.autotuning import AutotuningError
from dsx.config import load_config
from dsx.planned import PlannedEngine
from dsx_plan.autotuning.documents import lists_to_try, value_at, with_values
from dsx_plan.autotuning.space import BUCKETS, Candidate, read_space, without_twins

MICRO, STEPS, TRAIN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
TYPES = PlannedEngine().value_type


def section(**given):
    return load_config({MICRO: 1, "autotuning": {"enabled": True, **given}}, world_size=1).autotuning


def space(document, ranks=2, from_arguments=None, **given):
    return read_space(document, section(**given), TYPES, data_parallel=ranks, from_arguments=from_arguments or {})


def triples(found):
    return {(one.stage, one.micro, one.steps) for one in found.candidates()}


def test_an_empty_configuration_leaves_stage_and_micro_batch_open():
    found = space({}, max_train_micro_batch_size_per_gpu=8)
    assert triples(found) == set(itertools.product((0, 1, 2, 3), (1, 2, 4, 8), (1,)))
    assert found.start == found.safest() == Candidate(3, 1, 1)


def test_numbers_of_stage_and_accumulation_are_kept_and_that_of_the_micro_batch_is_the_start():
    document = {"zero_optimization": {"stage": 2}, MICRO: 3, STEPS: 4}
    found = space(document, max_train_micro_batch_size_per_gpu=8)
    assert triples(found) == {(2, micro, 4) for micro in (1, 2, 3, 4, 8)}
    assert found.start == Candidate(2, 3, 4)


def test_lists_are_tried_as_they_are():
    document = {
        "zero_optimization": {"stage": [1, 3], "reduce_bucket_size": [5e7, 1000]},
        MICRO: [6, 2],
        STEPS: [1, 3],
        "activation_checkpointing": {"memory_budget": [None, 0.5]},
    }
    found = space(document)
    assert len(found.candidates()) == len(set(found.candidates())) == 2 * 2 * 2 * 2 * 2
    assert triples(found) == set(itertools.product((1, 3), (2, 6), (1, 3)))
    values = {
        (one.changes["zero_optimization.reduce_bucket_size"], one.changes["activation_checkpointing.memory_budget"])
        for one in found.candidates()
    }
    assert values == set(itertools.product((5e7, 1000), (None, 0.5)))
    assert found.start.micro == 6, "the first of a list is where the search begins"


def test_a_global_batch_is_kept():
    found = space({TRAIN: 24, MICRO: 2}, ranks=2)
    assert {(micro, steps) for _, micro, steps in triples(found)} == {(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)}
    listed = space({TRAIN: 24, STEPS: [2, 5]}, ranks=2)
    assert {(micro, steps) for _, micro, steps in triples(listed)} == {(6, 2)}


def test_batch_sizes_of_the_command_line_stand_where_the_configuration_says_auto():
    found = space({MICRO: "auto", STEPS: "auto"}, from_arguments={MICRO: 5, STEPS: 2})
    assert (found.start.micro, found.start.steps) == (5, 2)
    assert {steps for _, _, steps in triples(found)} == {2}


def test_bounds_of_the_global_batch_belong_to_it():
    found = space({}, min_train_batch_size=8, max_train_batch_size=16, max_train_micro_batch_size_per_gpu=64)
    assert {micro for _, micro, _ in triples(found)} == {4, 8}


@pytest.mark.parametrize("stage", ["auto", "all", ["all"], None])
def test_words_for_every_stage(stage):
    assert {one[0] for one in triples(space({"zero_optimization": {"stage": stage}}))} == {0, 1, 2, 3}


def test_the_short_form_of_zero_is_a_stage():
    found = space({"zero_optimization": True}, max_train_micro_batch_size_per_gpu=1)
    assert triples(found) == {(1, 1, 1)}
    assert found.start.applied_to({"zero_optimization": True})["zero_optimization"] == {"stage": 1}


def test_without_fast_also_buckets_and_overlap_unless_the_configuration_says_them():
    slow = {"fast": False, "max_train_micro_batch_size_per_gpu": 1}
    by_stage = {stage: [one for one in space({}, **slow).candidates() if one.stage == stage] for stage in range(4)}
    assert [len(by_stage[stage]) for stage in range(4)] == [1, 9, 18, 12]
    fixed = {
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "reduce_bucket_size": 7,
            "allgather_bucket_size": "auto",
        }
    }
    assert len(space(fixed, **slow).candidates()) == 3


def test_buckets_larger_than_the_model_are_one_candidate():
    found = space({"zero_optimization": {"stage": 2}}, fast=False, max_train_micro_batch_size_per_gpu=1).candidates()
    assert len(without_twins(found, 1000)) == 2  # overlap_comm stays
    assert len(without_twins(found, 10**12)) == len(found)
    assert set(without_twins(found, 10**8)) <= set(found)


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"zero_optimization": {"stage": [1, 4]}}, "got 4"),
        ({"zero_optimization": {"stage": []}}, "an empty list"),
        ({"zero_optimization": {"stage": True}}, "got true"),
        ({MICRO: [2, "many"]}, '"many"'),
        ({MICRO: [0]}, "at least 1"),
        ({"zero_optimization": {"overlap_comm": []}}, "empty list"),
        ({TRAIN: 7}, "no combination of batch sizes for 2"),
        ({MICRO: [2000]}, "no combination"),
    ],
)  # fmt: skip
def test_what_cannot_be_tried_is_named(document, text):
    with pytest.raises(AutotuningError, match=text):
        space(document)


def test_lists_that_are_values_stay_values():
    document = {
        "optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.95], "lr": [1, 2]}},
        "elasticity": {"micro_batch_sizes": [2, 4]},
        "unknown_key": [1],
        "zero_optimization": {"overlap_comm": [True, False]},
        "fp16": {"enabled": [True, False]},
    }
    found = lists_to_try(document, TYPES)
    assert found == {
        "zero_optimization.overlap_comm": (True, False),
        "fp16.enabled": (True, False),
    }


def test_values_at_paths():
    document = {"a": {"b": 1}}
    changed = with_values(document, {"a.c": 2, "d.e": 3})
    assert changed == {"a": {"b": 1, "c": 2}, "d": {"e": 3}} and document == {"a": {"b": 1}}
    assert value_at(changed, "d.e") == 3 and value_at(changed, "a.x.y") is None


def test_bounds_hold_for_random_configurations():
    generator = random.Random(1)
    tried = 0
    for _ in range(300):
        ranks = generator.choice((1, 2, 3, 4, 6))
        bounds = {
            "min_train_micro_batch_size_per_gpu": generator.choice((1, 2)),
            "max_train_micro_batch_size_per_gpu": generator.choice((4, 16)),
            "min_train_batch_size": generator.choice((1, 8)),
            "max_train_batch_size": generator.choice((None, 64, 96)),
        }
        document = {}
        if generator.random() < 0.5:
            document[TRAIN] = generator.choice((24, 36, [24, 48]))
        if generator.random() < 0.5:
            document[MICRO] = generator.choice((1, 4, [1, 2, 3]))
        if generator.random() < 0.5:
            document[STEPS] = generator.choice((1, 2, [1, 2, 4]))
        try:
            found = space(document, ranks=ranks, **bounds)
        except AutotuningError:
            continue
        tried += 1
        names = [one.name for one in found.candidates()]
        assert len(set(names)) == len(names) and found.start in found.candidates()
        for one in found.candidates():
            batch = one.micro * one.steps * ranks
            assert bounds["min_train_micro_batch_size_per_gpu"] <= one.micro
            assert one.micro <= bounds["max_train_micro_batch_size_per_gpu"]
            assert bounds["min_train_batch_size"] <= batch <= (bounds["max_train_batch_size"] or batch)
            kept = document.get(TRAIN)
            assert kept is None or batch in (kept if isinstance(kept, list) else [kept])
            applied = one.applied_to(document)
            assert load_config(applied, world_size=ranks).batch.train == batch
    assert tried > 150


def test_names_and_keys_are_stable_and_tell_candidates_apart():
    found = space({"zero_optimization": {"stage": [1]}}, fast=False, max_train_micro_batch_size_per_gpu=2).candidates()
    again = space({"zero_optimization": {"stage": [1]}}, fast=False, max_train_micro_batch_size_per_gpu=2).candidates()
    assert [one.key for one in found] == [one.key for one in again]
    assert len({one.name for one in found}) == len(found)
    assert all(set(one.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.-") for one in found)
    assert all(path in json.loads(one.key) for one in found for path in BUCKETS[:2])
