"""Every mistake has a name, a path, a got, an expected and a fix; several are reported together."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from dsx.config import DsxConfigError, availability, load_config
from dsx.config.sections import judged, whole_model
from dsx_testkit import run_ranks

BATCH = {"train_micro_batch_size_per_gpu": 1}


def problems_of(config, world_size=1):
    with pytest.raises(DsxConfigError) as caught:
        load_config(config, world_size=world_size)
    return caught.value.problems


# (configuration beside the batch size, path, kind, part of got, part of expected, part of fix)
CASES = {
    "unknown top-level key": (
        {"gradient_cliping": 1.0}, "gradient_cliping", "unknown-key", "", "gradient_clipping", "gradient_clipping",
    ),
    "unknown key in a section": (
        {"fp16": {"hystersis": 2}}, "fp16.hystersis", "unknown-key", "", "fp16.hysteresis", "did you mean",
    ),
    "unknown key in a block of zero": (
        {"zero_optimization": {"offload_param": {"devise": "none"}}}, "zero_optimization.offload_param.devise",
        "unknown-key", "", "zero_optimization.offload_param.device", "device",
    ),
    "unknown zero key": (
        {"zero_optimization": {"stag": 1}}, "zero_optimization.stag", "unknown-key", '"stag"',
        "zero_optimization.stage", "stage",
    ),
    "key of another section": (
        {"stage": 2}, "stage", "unknown-key", "", "zero_optimization.stage", "move it to zero_optimization.stage",
    ),
    "unknown key two levels down": (
        {"timers": {"throughput": {"synchronised": True}}}, "timers.throughput.synchronised", "unknown-key", "",
        "timers.throughput.synchronized", "synchronized",
    ),
    "text for a number": (
        {"gradient_clipping": "1.0"}, "gradient_clipping", "type", '"1.0"', "a number", "without quotes",
    ),
    "text for a switch": (
        {"fp16": {"enabled": "true"}}, "fp16.enabled", "type", '"true"', "true or false", "without quotes",
    ),
    "number for a switch": ({"bf16": {"enabled": 2}}, "bf16.enabled", "type", "2", "true or false", ""),
    "switch for a number": ({"steps_per_print": True}, "steps_per_print", "type", "true", "a whole number", ""),
    "fraction for a whole number": (
        {"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps", "type", "1.5", "a whole number", "",
    ),
    "object for a number": ({"gradient_clipping": {"value": 1}}, "gradient_clipping", "type", "value", "a number", ""),
    "number for an object": ({"fp16": 3}, "fp16", "type", "3", "an object", ""),
    "list for an object": ({"optimizer": []}, "optimizer", "type", "[]", "an object", ""),
    "stage 4": ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "value", "4", "3", ""),
    "stage -1": ({"zero_optimization": {"stage": -1}}, "zero_optimization.stage", "value", "-1", "0", ""),
    "negative batch": ({"train_batch_size": -8}, "train_batch_size", "value", "-8", "at least 1", "at least 1"),
    "zero accumulation": (
        {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps", "value", "0", "at least 1", "",
    ),
    "negative clipping": ({"gradient_clipping": -1}, "gradient_clipping", "value", "-1", "at least 0", ""),
    "negative bucket": (
        {"zero_optimization": {"reduce_bucket_size": -5}}, "zero_optimization.reduce_bucket_size", "value", "-5", "",
        "",
    ),
    "block of three": (
        {"zero_optimization": {"stage": 1, "zero_quantized_gradients": True, "zero_quantized_gradients_block_size": 3}},
        "zero_optimization.zero_quantized_gradients_block_size", "value", "3", "a multiple of 4 greater than 0", "",
    ),
    "negative block": (

        {"zero_optimization": {
            "stage": 1, "zero_quantized_gradients": True, "zero_quantized_gradients_block_size": -4,
        }},
        "zero_optimization.zero_quantized_gradients_block_size", "value", "-4", "a multiple of 4 greater than 0", "",
    ),
    "negative window": ({"fp16": {"loss_scale_window": -1}}, "fp16.loss_scale_window", "value", "-1", "at least 1", ""),
    "negative learning rate": (
        {"optimizer": {"type": "Adam", "params": {"lr": -1e-3}}}, "optimizer.params.lr", "value", "-0.001",
        "at least 0", "",
    ),
    "unknown choice": (
        {"communication_data_type": "bf17"}, "communication_data_type", "value", '"bf17"', '"bf16"', "bf16",
    ),
    "boolean communication type": (
        {"communication_data_type": True}, "communication_data_type", "value", "true", '"fp32"', "",
    ),
    "fp16 with bf16": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled", "conflict", "fp16.enabled true",
        "one of", "off",
    ),
    "fp16 with amp": (
        {"fp16": {"enabled": True}, "amp": {"enabled": True}}, "amp.enabled", "conflict", "amp.enabled true", "one of",
        "off",
    ),
    "fp16 with autocast to bf16": (
        {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}}, "torch_autocast.enabled", "conflict", "",
        "one of", "off",
    ),
    "apex level 2": ({"amp": {"enabled": True, "opt_level": "O2"}}, "amp.opt_level", "conflict", "O2", "O1", "fp16"),
    "bf16 reduced in fp16": (
        {"bf16": {"enabled": True}, "communication_data_type": "fp16"}, "communication_data_type", "conflict", "", "",
        "",
    ),
    "fp16 accumulated in bf16": (
        {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, "data_types", "conflict", "", "", "",
    ),
    "bf16 states without masters": (
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states", "conflict", "",
        "master_weights", "both",
    ),
    "fp16 masters without ZeRO": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads",
        "conflict", "stage 0", "1, 2 or 3", "stage",
    ),
    "parameter offload at stage 2": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "zero_optimization.offload_param",
        "conflict", "stage 2", "stage 3", "remove offload_param, which has nothing to offload at stage 2",
    ),
    "optimizer offload at stage 0": (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "zero_optimization.offload_optimizer",
        "conflict", "stage 0", "1 or 2 or 3", "stage",
    ),
    "optimizer offload to disk at stage 0": (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}},
        "zero_optimization.offload_optimizer", "conflict", "stage 0", "1 or 2 or 3", "stage",
    ),
    "unknown optimizer": (
        {"optimizer": {"type": "AdamX"}}, "optimizer.type", "value", '"AdamX"', "Adam", "did you mean",
    ),
    "unknown optimizer argument": (
        {"optimizer": {"type": "Adam", "params": {"beta": [0.9, 0.99]}}}, "optimizer.params.beta", "unknown-key", "",
        "betas", "betas",
    ),
    "unknown torch argument": (
        {"optimizer": {"type": "RMSprop", "params": {"alpa": 0.9}}}, "optimizer.params.alpa", "unknown-key", "",
        "alpha", "alpha",
    ),
    "bad betas": (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}, "optimizer.params.betas", "type", "",
        "two numbers", "",
    ),
    "clipping in the optimizer": (
        {"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm", "value",
        "1.0", "", "gradient_clipping",
    ),
    "optimizer without a type": ({"optimizer": {"params": {}}}, "optimizer.type", "missing", "", "text", 'add "type"'),
    "automatic optimizer": ({"optimizer": {"type": "auto"}}, "optimizer.type", "missing", "", "", "cannot be resolved"),
    "unknown scheduler": (
        {"scheduler": {"type": "WarmUpLRs"}}, "scheduler.type", "value", "WarmUpLRs", "WarmupLR", "WarmupLR",
    ),
    "scheduler lacks an argument": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "scheduler.params.total_num_steps", "missing", "", "",
        "total_num_steps",
    ),
    "unknown scheduler argument": (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min": 0.1}}}, "scheduler.params.cycle_min", "unknown-key",
        "", "cycle_min_lr", "",
    ),
    "bad scheduler argument": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}, "scheduler.params", "value", "cubic",
        "", "WarmupLR",
    ),
    "unknown torch scheduler argument": (
        {"scheduler": {"type": "StepLR", "params": {"step_size": 3, "gama": 0.1}}}, "scheduler.params.gama",
        "unknown-key", "", "gamma", "gamma",
    ),
    "two names of one key": (
        {"aio": {"thread_count": 2, "intra_op_parallelism": 4}}, "aio.thread_count", "conflict", "2 and 4", "one",
        "intra_op_parallelism",
    ),
    "a value that is not JSON": (
        {"gradient_clipping": object()}, "gradient_clipping", "type", "object", "a number", "",
    ),
    "a number that is not finite": ({"gradient_clipping": float("nan")}, "gradient_clipping", "value", "nan", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_mistake_is_named(name):
    config, path, kind, got, expected, fix = CASES[name]
    found = [problem for problem in problems_of({**BATCH, **config}) if problem.path == path and problem.kind == kind]
    assert len(found) == 1, [str(problem) for problem in problems_of({**BATCH, **config})]
    problem = found[0]
    assert got in problem.got
    assert expected in problem.expected
    assert fix in problem.fix
    assert path in str(problem)


BATCHES = {
    "the three contradict": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 2, "16",
    ),
    "micro-batch does not divide": ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, 2, "8 or 16"),
    "accumulation does not divide": ({"train_batch_size": 10, "gradient_accumulation_steps": 3}, 2, "6 or 12"),
    "fewer samples than ranks": ({"train_batch_size": 2}, 4, "4"),
    "only accumulation": ({"gradient_accumulation_steps": 2}, 1, "train_micro_batch_size_per_gpu"),
    "nothing": ({}, 1, "train_micro_batch_size_per_gpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_batch_sizes_that_do_not_fit(name):
    config, world_size, fix = BATCHES[name]
    (problem,) = problems_of(config, world_size)
    assert problem.path == "train_batch_size"
    assert problem.kind in ("conflict", "missing")
    assert fix in problem.fix
    assert str(world_size) in problem.got


def test_all_problems_are_reported_together():
    found = problems_of(
        {
            "train_batch_size": 3,
            "train_micro_batch_size_per_gpu": 2,
            "fp16": {"enabled": True, "hystersis": 2},
            "bf16": {"enabled": True},
            "optimizr": {},
            "gradient_clipping": "one",
            "graph_harvesting": True,
        }
    )
    assert {problem.path for problem in found} == {
        "train_batch_size", "fp16.hystersis", "bf16.enabled", "optimizr", "gradient_clipping",
        "graph_harvesting",
    }  # fmt: skip


def test_a_wrong_batch_size_brings_no_second_message_about_batches():
    (problem,) = problems_of({"train_batch_size": "32"})
    assert problem.kind == "type"


def test_problems_point_into_the_file(tmp_path):
    file = tmp_path / "dsx.json"
    file.write_text('{\n  "train_micro_batch_size_per_gpu": 1,\n  "zero_optimization": {\n    "stag": 2\n  }\n}\n')
    with pytest.raises(DsxConfigError) as caught:
        load_config(file, world_size=1)
    (problem,) = caught.value.problems
    assert problem.where == "line 4, column 5"
    assert "line 4, column 5" in str(caught.value)
    assert str(file) in str(caught.value)


def test_second_names_point_to_what_was_written(tmp_path):
    file = tmp_path / "dsx.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 1,\n"bfloat16": {"enabeld": true}}')
    with pytest.raises(DsxConfigError) as caught:
        load_config(file, world_size=1)
    assert caught.value.problems[0].where == "line 2, column 14"


def test_the_error_is_a_value_error_and_survives_pickling():
    import pickle

    with pytest.raises(ValueError) as caught:
        load_config({"stage": 1}, world_size=1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.problems == caught.value.problems


def _text_of_error(rank, world_size):
    import torch.distributed

    os.environ["RANK"] = str(rank)
    try:
        load_config({"train_batch_size": 3, "fp16": {"enabeld": True}}, world_size=world_size)
    except DsxConfigError as error:
        return str(error), torch.distributed.is_initialized()


def test_all_ranks_say_the_same_and_no_process_group_is_made():
    results = run_ranks(_text_of_error, 2, backend=None)
    assert results[0] == results[1]
    assert results[0][1] is False
    assert "train_batch_size" in results[0][0]
    assert "fp16.enabeld" in results[0][0]


def test_importing_the_package_loads_neither_pydantic_nor_torch():
    code = "import sys, dsx.config, dsx.lr_schedules, dsx.loss_scaler, dsx.precision, dsx.errors; "
    code += "print([name for name in ('torch', 'pydantic') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


NOT_AVAILABLE = {
    "zero_optimization.legacy_stage1": {"zero_optimization": {"stage": 1, "legacy_stage1": True}},
    "zero_optimization.offload_optimizer.super_offload": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}
    },
    "zero_optimization.zenflow": {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
}


@pytest.mark.parametrize("path", NOT_AVAILABLE)
def test_what_is_not_available_is_refused_with_the_reason(path):
    (problem,) = problems_of({**BATCH, **NOT_AVAILABLE[path]})
    assert problem.kind == "not-available"
    assert problem.path == path
    assert f"not available yet: {path}" in str(problem)
    assert problem.fix == "remove it or switch it off: " + judged(whole_model(), "NOT_YET")[path]


REFUSED = {
    "torch_autocast.lower_precision_safe_modules": {
        "torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["a"]}
    },
    "hybrid_engine": {"hybrid_engine": {"enabled": True}},
    "nebula": {"nebula": {"enabled": True}},
    "compile.deepcompile": {"compile": {"deepcompile": True}},
    "datastates_ckpt": {"datastates_ckpt": {"host_cache_size": 1}},
    "graph_harvesting": {"graph_harvesting": True},
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_will_not_be_there_is_refused_with_what_to_do(path):
    (problem,) = problems_of({**BATCH, **REFUSED[path]})
    assert problem.kind == "not-available" and problem.path == path
    assert f"not supported: {path}" in str(problem)
    assert problem.fix == f"remove it or switch it off; {availability.REFUSED[path]}" and len(problem.fix) > 50


def test_every_refused_feature_is_tried():
    assert set(availability.REFUSED) == set(REFUSED)


def test_blocks_that_are_switched_off_are_accepted():
    off = {
        "autotuning": {"enabled": False, "metric": "latency", "fast": False},
        "elasticity": {"enabled": False, "max_train_batch_size": 64},
        "compression_training": {
            "weight_quantization": {"shared_parameters": {"enabled": False, "quantize_groups": 4}}
        },
        "data_efficiency": {"enabled": False, "data_sampling": {"enabled": True}},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}, "zero_hpz_partition_size": 1},
    }
    assert load_config({**BATCH, **off}, world_size=1).zero_optimization.stage == 3


def test_the_command_reports_all_problems_and_fails(tmp_path, capsys):
    from dsx.config.cli import main

    file = tmp_path / "dsx.json"
    file.write_text(json.dumps({**BATCH, "stage": 1, "gradient_clipping": -1}))
    assert main(["check", str(file)]) == 1
    shown = capsys.readouterr()
    assert "2 problems" in shown.err
    words = {line.split()[0]: line.split()[2] for line in shown.out.splitlines()}  # a line for each key
    assert words["stage"] == words["gradient_clipping"] == "refused"


def test_all_unknown_keys_are_found_in_one_pass(monkeypatch):
    """At the top and in every section, beside values that are wrong. A pass reports what one validation has found."""
    from dsx.config import load, schema
    from pydantic import BaseModel

    config: dict = {**BATCH, "unheard_of": 1, "gradient_clipping": "one"}
    for name, field in schema.Root.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            config[name] = {"unheard_of": 1, "enabled": "perhaps"}
    passes = []
    report = load.problems_of
    monkeypatch.setattr(load, "problems_of", lambda *given: passes.append(report(*given)) or passes[-1])
    monkeypatch.setattr(load, "MOST_PROBLEMS", 1000)
    problems_of(config)
    unknown = [[problem.path for problem in found if problem.kind == "unknown-key"] for found in passes]
    planted = {f"{name}.unheard_of" for name, value in config.items() if isinstance(value, dict)}
    assert len(planted) > 20 and {"unheard_of", *planted} <= set(unknown[0])
    assert not any(unknown[1:])
