"""`dsx config check` says for each key of a DeepSpeed configuration what happens with it."""

from __future__ import annotations

import json

import pytest
from dsx.config.cli import main
from dsx.config.verdicts import BETTER, DIFFERS, verdicts

HUGGING_FACE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip


def words(config):
    return {verdict.path: verdict for verdict in verdicts(config)}


def test_every_value_of_a_hugging_face_file_has_a_verdict_and_none_is_refused():
    found = words(HUGGING_FACE)

    def paths(value, prefix=""):
        if not isinstance(value, dict):
            return [prefix[:-1]]
        return [path for key, item in value.items() for path in paths(item, f"{prefix}{key}.")]

    assert list(found) == paths(HUGGING_FACE)
    assert {verdict.word for verdict in found.values()} <= {"used", "auto", "no effect"}
    assert found["zero_optimization.stage"].deepspeed == "better"
    assert found["train_batch_size"].word == "auto"
    assert found["steps_per_print"].deepspeed == "differs"
    assert found["optimizer.type"].deepspeed == "same"


@pytest.mark.parametrize(
    ("config", "path", "word", "text"),
    [
        ({"zero_allow_untested_optimizer": True}, "zero_allow_untested_optimizer", "no effect", "may be used"),
        ({"disable_allgather": True}, "disable_allgather", "no effect", "DeepSpeed"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "zero_optimization.offload_optimizer.super_offload", "refused", "not available",
        ),
        ({"zero_optimization": {"stag": 3}}, "zero_optimization.stag", "refused", "stage"),
        ({"gradient_cliping": 1.0}, "gradient_cliping", "refused", "gradient_clipping"),
        ({"bfloat16": {"check_grad_overflow": True}}, "bfloat16.check_grad_overflow", "used", "stage 3"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled", "refused", "fp16"),
    ],
)  # fmt: skip
def test_a_key_gets_its_word(config, path, word, text):
    found = words({"train_micro_batch_size_per_gpu": 1, **config})
    assert (found[path].word, text in found[path].text) == (word, True), found[path]


def test_what_is_wrong_with_the_whole_document_comes_last():
    *_, last = verdicts({"gradient_accumulation_steps": 2})
    assert last.word == "refused" and "batch" in last.text


def test_the_command_prints_the_table_and_fails_for_a_refused_key(tmp_path, capsys):
    file = tmp_path / "dsx.json"
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}
    file.write_text(json.dumps(config))
    assert main(["check", str(file)]) == 1
    shown = capsys.readouterr()
    rows = {line.split()[0]: line for line in shown.out.splitlines()}
    assert "used" in rows["train_batch_size"]
    assert "plain PyTorch" in rows["zero_optimization.stage"]
    refused = next(row for name, row in rows.items() if name.startswith("zero_optimization.zenflow"))
    assert "refused" in refused and "not available yet" in refused
    assert "not available yet" in shown.err


def test_the_tables_name_keys_that_exist():
    from dsx.config.sections import judged, whole_model
    from dsx.config.translate import all_paths

    model = whole_model()
    known = {*all_paths(model)}
    known |= {path.rpartition(".")[0] for path in known} | {path.split(".")[0] for path in known}
    better, differs = judged(model, "BETTER"), judged(model, "DIFFERS")
    assert {"autotuning", "comms_logger", "tensorboard", "zero_optimization.stage"} <= set(better)
    assert "comms_logger.enabled" in differs
    assert {*BETTER, *DIFFERS, *better, *differs} <= known


def test_an_old_name_that_acts_is_not_said_to_have_no_effect():
    document = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True},
    }
    found = {verdict.path: verdict for verdict in verdicts(document)}
    for name, read_as in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        verdict = found[f"zero_optimization.{name}"]
        assert verdict.word == "used" and f"read as {read_as}" in verdict.text
