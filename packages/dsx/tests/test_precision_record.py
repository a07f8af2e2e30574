"""The precision record: what each mode means, what is refused, how it travels."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from dsx.config import DsxConfigError, load_config
from dsx.errors import PrecisionError
from dsx.precision import Precision, dtype, name_of, precision_problems

ROLES = ("params", "compute", "grad_accum", "reduce", "master", "optimizer_state")

MODES = {
    # parameters, compute, accumulation, reduction, master, states
    "nothing": ({}, ["fp32"] * 6),
    "bf16": ({"bf16": {"enabled": True}}, ["bf16", "bf16", "bf16", "bf16", "fp32", "fp32"]),
    "fp16": ({"fp16": {"enabled": True}}, ["fp16", "fp16", "fp16", "fp16", "fp32", "fp32"]),
    "bf16, fp32 sums": (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        ["bf16", "bf16", "fp32", "bf16", "fp32", "fp32"],
    ),
    "bf16, fp32 messages": (
        {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
        ["bf16", "bf16", "bf16", "fp32", "fp32", "fp32"],
    ),
    "bf16 masters": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "zero_optimization": {"stage": 1}},
        ["bf16", "bf16", "bf16", "bf16", "bf16", "fp32"],
    ),
    "bf16 everywhere": (
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "zero_optimization": {"stage": 3},
        },
        ["bf16"] * 6,
    ),
    "fp16 masters": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, "zero_optimization": {"stage": 2}},
        ["fp16"] * 6,
    ),
    "autocast": ({"torch_autocast": {"enabled": True}}, ["fp32", "bf16", "fp32", "fp32", "fp32", "fp32"]),
    "autocast fp16": (
        {"torch_autocast": {"enabled": True, "dtype": "fp16"}},
        ["fp32", "fp16", "fp32", "fp32", "fp32", "fp32"],
    ),
    "amp": ({"amp": {"enabled": True}}, ["fp32", "fp16", "fp32", "fp32", "fp32", "fp32"]),
    "amp off by level": ({"amp": {"enabled": True, "opt_level": "O0"}}, ["fp32"] * 6),
    "fp32, bf16 messages": ({"communication_data_type": "bf16"}, ["fp32", "fp32", "fp32", "bf16", "fp32", "fp32"]),
    "the mode named again": (
        {"bf16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}},
        ["bf16", "bf16", "bf16", "bf16", "fp32", "fp32"],
    ),
}


@pytest.mark.parametrize("name", MODES)
def test_each_mode_means_what_the_table_says(name):
    section, expected = MODES[name]
    record = load_config({"train_batch_size": 1, **section}, world_size=1).precision
    assert [getattr(record, role) for role in ROLES] == expected
    assert record.autocast is (record.params != record.compute)
    for role, short in zip(ROLES, expected, strict=True):
        assert f" {short}" in record.describe()
        assert record.dtype(role) is dtype(short)


def test_switches_of_the_modes_reach_the_record():
    def record(**section):
        return load_config({"train_batch_size": 1, **section}, world_size=1).precision

    assert record(fp16={"enabled": True, "auto_cast": True}).cast_inputs
    assert not record(fp16={"enabled": True}).cast_inputs
    assert record(fp16={"enabled": True}).check_overflow and record(fp16={"enabled": True}).needs_loss_scale
    assert record(bf16={"enabled": True}).check_overflow and not record(bf16={"enabled": True}).needs_loss_scale
    assert not record(bf16={"enabled": True, "check_grad_overflow": False}).check_overflow
    assert not record().check_overflow
    assert record(torch_autocast={"enabled": True}).safe_modules is None


ILLEGAL = [
    {"params": "bf16"},
    {"compute": "bf16"},
    {"params": "bf16", "compute": "bf16", "reduce": "fp16"},
    {"params": "bf16", "compute": "bf16", "grad_accum": "fp16"},
    {"params": "fp16", "compute": "fp16", "grad_accum": "bf16"},
    {"params": "fp16", "compute": "fp16", "reduce": "bf16"},
    {"params": "bf16", "compute": "bf16", "master": "fp16"},
    {"master": "bf16"},
    {"grad_accum": "bf16"},
    {"params": "bf16", "compute": "bf16", "optimizer_state": "bf16"},
    {"params": "bf16", "compute": "fp16", "autocast": True},
]


@pytest.mark.parametrize("fields", ILLEGAL)
def test_combinations_that_cannot_train_are_refused(fields):
    with pytest.raises(PrecisionError, match=r"use|keep"):
        Precision(**fields)


def test_every_combination_is_either_sound_or_says_why_not():
    names = ("fp32", "bf16", "fp16")
    legal = 0
    for values in itertools.product(names, repeat=6):
        fields = dict(zip(ROLES, values, strict=True))
        for autocast in (False, True):
            try:
                record = Precision(**fields, autocast=autocast)
            except PrecisionError as error:
                assert len(str(error)) > 20
                continue
            legal += 1
            assert precision_problems(record) == []
            low = {getattr(record, role) for role in ("compute", "grad_accum", "master")} - {"fp32"}
            assert len(low) <= 1, fields
    assert 10 < legal < 200


def test_the_record_travels_as_json():
    record = Precision(params="fp32", compute="bf16", autocast=True, safe_modules=("a", "b"))
    again = Precision.from_json(json.loads(json.dumps(record.to_json())))
    assert again == record
    with pytest.raises(PrecisionError, match="unknown fields weights"):
        Precision.from_json({"weights": "fp32"})
    with pytest.raises(PrecisionError, match="autocast"):
        Precision.from_json({**record.to_json(), "params": "fp16"})


def test_names_and_dtypes():
    assert dtype("bf16") is torch.bfloat16 and dtype("float16") is torch.float16
    assert name_of(torch.float32) == "fp32" and name_of("half") == "fp16" and name_of("BFloat16") == "bf16"
    with pytest.raises(PrecisionError, match="expected one of fp32, bf16, fp16"):
        name_of("int8")
    with pytest.raises(PrecisionError, match="role"):
        Precision().dtype("weights")
    with pytest.raises(PrecisionError):
        replace(Precision(), master="bf16")
    assert replace(Precision(), reduce="bf16").reduce == "bf16"


def test_a_wrong_parameter_type_is_a_problem_of_the_configuration():
    with pytest.raises(DsxConfigError, match=r"data_types\.param_dtype"):
        load_config({"train_batch_size": 1, "data_types": {"param_dtype": "bf16"}}, world_size=1)
