"""What a good configuration becomes: defaults, inference, provenance, round trip, use."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from dsx.config import load_config

BATCH = {"train_micro_batch_size_per_gpu": 1}

INFERENCE = [
    ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 4, (32, 4, 2)),
    ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 2, (32, 4, 4)),
    ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, 2, (32, 4, 4)),
    ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, 2, (24, 4, 3)),
    ({"train_batch_size": 32}, 8, (32, 4, 1)),
    ({"train_micro_batch_size_per_gpu": 3}, 5, (15, 3, 1)),
    (
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"},
        3, (6, 2, 1),
    ),
    ({"train_batch_size": 4.0}, 1, (4, 4, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("config", "world_size", "expected"), INFERENCE)
def test_the_missing_batch_size_is_computed(config, world_size, expected):
    batch = load_config(config, world_size=world_size).batch
    assert (batch.train, batch.micro, batch.accumulation) == expected
    assert batch.train == batch.micro * batch.accumulation * world_size
    given = {key for key, value in config.items() if value != "auto"}
    assert set(batch.derived).isdisjoint(given)
    assert set(batch.derived) | given == {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    }


# Documented defaults, among them all on which documentation and other implementations differ.
DEFAULTS = {
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "communication_data_type": None,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "fp16.enabled": False,
    "fp16.loss_scale": 0.0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.consecutive_hysteresis": False,
    "fp16.min_loss_scale": 1.0,
    "zero_optimization.stage": 0,
    "zero_optimization.stage3_prefetch_bucket_size": 500_000_000,
    "zero_optimization.stage3_param_persistence_threshold": 100_000,
    "zero_optimization.sub_group_size": 10**12,
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.grad_hooks": True,
    "aio.queue_depth": 8,
    "aio.overlap_events": True,
    "elasticity.prefer_large_batch": True,
    "autotuning.overwrite": False,
    "autotuning.tuner_type": "model_based",
    "autotuning.results_dir": "autotuning_results",
    "compression_training.sparse_pruning.shared_parameters.schedule_offset": 0,
    "compression_training.activation_quantization.shared_parameters.range_calibration": "static",
    "checkpoint.tag_validation": "Warn",
    "wandb.project": "deepspeed",
    "comet.samples_log_interval": 100,
    "csv_monitor.job_name": "DeepSpeedJobName",
    "flops_profiler.module_depth": -1,
    "comms_logger.enabled": False,
    "zero_allow_untested_optimizer": False,
    "wall_clock_breakdown": False,
    "timers.throughput.enabled": True,
}


@pytest.mark.parametrize("path", DEFAULTS)
def test_documented_defaults(path):
    written = (
        {"autotuning": {"fast": True}} if path.startswith("autotuning.") else {}
    )  # an extension's: explained where it is used
    row = load_config({**BATCH, **written}, world_size=1).explain()[path]
    assert row.value == DEFAULTS[path]
    assert row.origin == "default"


def test_the_default_clipping_is_reported():
    row = load_config(BATCH, world_size=1).explain()["gradient_clipping"]
    assert (row.value, row.origin) == (1.0, "default")
    assert "clipped to norm 1.0 by default" in row.note
    explicit = load_config({**BATCH, "gradient_clipping": 0}, world_size=1)
    assert explicit.gradient_clipping == 0.0
    assert explicit.explain()["gradient_clipping"].origin == "dictionary"


def test_every_value_tells_where_it_came_from(tmp_path):
    file = tmp_path / "dsx.json"
    file.write_text(
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": true, "hysteresis":'
        ' "auto"},"zero_optimization": {"stage": 2, "prefetch_bucket_size": 7}, "optimizer": {"type": "AdamW",'
        ' "params": {"lr": "auto"}}}'
    )
    table = load_config(file, world_size=2).explain()
    origins = {row.path: row.origin for row in table}
    assert origins["train_batch_size"] == "file"
    assert origins["train_micro_batch_size_per_gpu"] == "auto"
    assert origins["gradient_accumulation_steps"] == "derived"
    assert origins["fp16.enabled"] == "file"
    assert origins["fp16.hysteresis"] == "auto"
    assert table["fp16.hysteresis"].value == 2
    assert origins["fp16.loss_scale"] == "default"
    assert origins["zero_optimization.stage3_prefetch_bucket_size"] == "file"
    assert origins["precision.params"] == "derived"
    assert (table["optimizer.params.lr"].value, origins["optimizer.params.lr"]) == (None, "auto")
    assert "optimizer" in table.render(everything=False)
    short = table.render(everything=False)
    assert "gradient_clipping" in short and "fp16.loss_scale_window" not in short and "fp16.min_loss_scale" not in short
    assert "fp16.loss_scale_window" in str(table)


def test_the_automatic_warm_up_peak_is_the_optimizers_own_rate():
    config = {
        **BATCH,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    }
    assert load_config(config, world_size=1).scheduler.params == {"warmup_max_lr": None}


RICH = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001, "warmup_num_steps": 10}},
    "bfloat16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 3, "max_live_parameters": 1e6, "overlap_comm": False},
    "csv_monitor": {"enabled": True, "output_path": "logs"},
    "gradient_clipping": 0.5,
    "amp": None,
    "autotuning": {"enabled": False, "fast": False},
}


@pytest.mark.parametrize("complete", [False, True])
def test_the_configuration_survives_a_round_trip_through_json(complete):
    config = load_config(RICH, world_size=4)
    written = json.loads(json.dumps(config.to_dict(complete=complete)))
    again = load_config(written, world_size=4)
    assert again.root.model_dump() == {**config.root.model_dump(), "train_micro_batch_size_per_gpu": 2}
    assert again.batch.train == 16
    assert again.precision == config.precision
    assert again.to_dict(complete=complete) == config.to_dict(complete=complete)
    if not complete:
        assert set(written["zero_optimization"]) == {"stage", "stage3_max_live_parameters", "overlap_comm"}


def test_a_loaded_configuration_is_completed_anew_for_another_world():
    first = load_config({"train_micro_batch_size_per_gpu": 2}, world_size=1)
    assert load_config(first, world_size=1).to_dict() == first.to_dict()
    second = load_config(first, world_size=3)
    assert (second.batch.train, second.batch.micro) == (6, 2)
    fixed = load_config({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}, world_size=1)
    with pytest.raises(ValueError, match="split evenly"):
        load_config(fixed, world_size=3)


def test_the_configuration_cannot_be_changed():
    config = load_config(BATCH, world_size=1)
    with pytest.raises(AttributeError):
        config.source = "x"  # type: ignore[misc]
    with pytest.raises(ValueError):
        config.root.gradient_clipping = 2.0
    with pytest.raises(ValueError):
        config.fp16.enabled = True
    with pytest.raises(AttributeError, match="no key 'gradient_cliping'"):
        config.gradient_cliping
    assert copy.deepcopy(config).batch == config.batch
    assert pickle.loads(pickle.dumps(config)).root == config.root


def test_what_nobody_used_is_reported():
    config = load_config({**RICH, "wall_clock_breakdown": True, "disable_allgather": True}, world_size=4)
    assert config.use("optimizer").type == "Adam"
    assert config.use("precision").params == "bf16"
    assert config.use("batch").accumulation == 2
    assert config.use("zero").stage == 3
    config.use("gradient_clipping")
    # Blocks that are switched off and keys without meaning ask for nothing.
    assert config.tracker.unused() == ["scheduler", "csv_monitor", "wall_clock_breakdown"]
    assert "scheduler, csv_monitor, wall_clock_breakdown" in config.unused_report()
    for key in ("scheduler", "csv_monitor", "wall_clock_breakdown"):
        config.use(key)
    assert config.unused_report() == ""


def test_keys_without_meaning_here_give_one_warning_that_names_them_all():
    config = load_config(
        {
            **BATCH,
            "disable_allgather": True,
            "vocabulary_size": 5,
            "zero_optimization": {"stage": 1, "allgather_partitions": True, "round_robin_gradients": True},
            "checkpoint": {"load_universal": True},
        },
        world_size=1,
    )
    (warning,) = config.warnings
    for path in (
        "disable_allgather", "vocabulary_size", "zero_optimization.allgather_partitions",
        "zero_optimization.round_robin_gradients", "checkpoint.load_universal",
    ):  # fmt: skip
        assert f"{path}: " in warning
    assert load_config(BATCH, world_size=1).warnings == ()


def test_a_setting_of_zero_is_judged_by_dsx_zero_alone():
    from dsx.config.sections import judged, whole_model
    from dsx_zero import config as section

    model = whole_model()
    assert {f"zero_optimization.{name}" for name in section.NOT_YET} <= set(judged(model, "NOT_YET"))
    assert {f"zero_optimization.{name}" for name in section.NO_EFFECT} <= set(judged(model, "NO_EFFECT"))
    known = set(section.ZeroConfig.model_fields)
    known |= {f"offload_param.{name}" for name in section.OffloadParam.model_fields}
    known |= {f"offload_optimizer.{name}" for name in section.OffloadOptimizer.model_fields}
    assert {*section.NOT_YET, *section.NO_EFFECT, *section.OLD_NAMES, *section.SECOND_NAMES.values()} <= known


def test_every_path_in_the_tables_exists():
    from dsx.config.availability import MEANINGLESS, REFUSED
    from dsx.config.normal import SECOND_NAMES
    from dsx.config.notes import NOTES
    from dsx.config.sections import judged, whole_model
    from dsx.config.translate import all_paths

    known = set(all_paths(whole_model()))
    of_sections = [judged(whole_model(), table) for table in ("NOT_YET", "NO_EFFECT", "OLD_NAMES")]
    for table in (*of_sections, REFUSED, MEANINGLESS, NOTES, SECOND_NAMES.values()):
        assert set(table) <= known, set(table) - known


def test_every_key_is_documented():
    from dsx.config.sections import whole_model
    from dsx.config.translate import all_paths, section_at

    for path in all_paths(whole_model()):
        loc = tuple(path.split("."))
        owner = section_at(whole_model(), loc[:-1])
        assert owner is not None, path
        assert owner.model_fields[loc[-1]].description, path


def test_short_forms_and_notes():
    config = load_config({**BATCH, "zero_optimization": True}, world_size=1)
    assert config.zero.stage == 1
    assert "zero_optimization: true is read as stage 1" in config.warnings


def test_the_json_schema_describes_the_keys():
    schema = load_config(BATCH, world_size=1).json_schema()
    assert schema["additionalProperties"] is False
    assert schema["properties"]["gradient_clipping"]["default"] == 1.0
    json.dumps(schema)


def test_explain_on_the_command_line(tmp_path, capsys):
    from dsx.config.cli import main

    file = tmp_path / "dsx.json"
    file.write_text('{"train_batch_size": 8, "disable_allgather": true}')
    assert main(["explain", str(file), "--world-size", "4"]) == 0
    shown = capsys.readouterr()
    assert "train_micro_batch_size_per_gpu" in shown.out
    assert "precision: parameters fp32" in shown.out
    assert "disable_allgather" in shown.err
    assert main(["explain", str(file), "--short", "--json"]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["train_batch_size"]["value"] == 8
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Configuration of dsx"
