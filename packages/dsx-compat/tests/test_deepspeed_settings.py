"""Keys that DeepSpeed ignores are warnings; keys that change training, and unknown keys of sections, stay errors."""

from __future__ import annotations

import argparse
import base64
import json
import logging
import subprocess
import sys
import warnings

import dsx_compat
import pytest
import torch

dsx_compat.activate()
import deepspeed  # noqa: E402

BASE = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def started(config, **arguments):
    """The engine and the text of the one warning, "" without."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config, **arguments)
    texts = [str(w.message) for w in caught if issubclass(w.category, dsx_compat.CompatWarning)]
    assert len(texts) <= 1
    assert all(w.filename == __file__ for w in caught if issubclass(w.category, dsx_compat.CompatWarning))
    return engine, "".join(texts)


@pytest.mark.parametrize("form", ["dictionary", "file", "text", "args"])
def test_unknown_keys_of_the_document_are_left_out_with_one_warning(form, tmp_path):
    config = BASE | {"data_parallel_size": 1, "_note": "mine", "gradient_cliping": 0.5}
    given = json.dumps(config)
    file = tmp_path / "ds.json"
    file.write_text(given)
    args = argparse.Namespace(deepspeed_config=str(file)) if form == "args" else None
    source = {"dictionary": config, "file": str(file), "text": base64.b64encode(given.encode()).decode(), "args": None}
    engine, text = started(source[form], args=args)
    assert "data_parallel_size" in text and "_note" in text and "DSX159" in text
    assert "gradient_cliping (did you mean gradient_clipping?)" in text
    assert engine.config["train_batch_size"] == 2 and "data_parallel_size" not in engine.config
    assert config == json.loads(given)


def _as_accelerate_writes():
    none = {"device": "none", "nvme_path": None}
    zero = {"stage": 2, "offload_optimizer": none, "offload_param": none}
    return BASE | {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": zero | {"stage3_gather_16bit_weights_on_model_save": False},
        "steps_per_print": float("inf"),
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


@pytest.mark.parametrize("form", ["dictionary", "file"])
def test_what_clients_write_by_themselves_gives_no_warning(form, tmp_path, caplog):
    config = _as_accelerate_writes()
    if form == "file":
        (tmp_path / "ds.json").write_text(json.dumps(config | {"steps_per_print": None}))  # JSON has no infinity
        config = str(tmp_path / "ds.json")
    with caplog.at_level(logging.INFO):
        engine, text = started(config)
    lines = [record.getMessage() for record in caplog.records]
    assert text == "" and lines  # the root logger's handlers get the lines of dsx
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == len(set(lines)) and engine.zero_allow_untested_optimizer() is True
    assert engine.steps_per_print() is None


@pytest.mark.parametrize(
    "key",
    [{"zero_allow_untested_optimizer": False}, {"zero_force_ds_cpu_optimizer": True}],
    ids=lambda key: next(iter(key)),
)
def test_a_wish_that_dsx_does_not_follow_gives_a_warning(key, caplog):
    started(BASE | key)
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told) == 1 and next(iter(key)) in told[0] and "DSX151" in told[0]


@pytest.mark.parametrize("configured", ["before", "after"])
def test_each_line_appears_once_beside_basic_config(configured):
    program = f"""
import logging, torch, dsx_compat
dsx_compat.activate()
import deepspeed
if {configured == "before"}:
    logging.basicConfig(level=logging.INFO)
deepspeed.initialize(model=torch.nn.Linear(2, 1), config={BASE})
logging.basicConfig(level=logging.INFO)
deepspeed.utils.logger.warning("one line")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.count("one line") == 1 and done.stderr.count("Engine(Linear") == 1


def test_known_documents_give_no_warning(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(BASE))
    for config in (BASE, str(tmp_path / "ds.json")):
        assert started(config)[1] == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"zero_optimization": {"stage": 1, "reduce_bucket_sise": 5}},  # DeepSpeed refuses it, too
        {"weight_quantization": {"enabled": True}},  # DeepSpeed acts on it
    ],
)
def test_what_would_change_training_stays_an_error(wrong, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**BASE, "other": 1, **wrong}, indent=1))
    with pytest.raises(ValueError, match="DSX101") as caught, pytest.warns(dsx_compat.CompatWarning, match="other"):
        deepspeed.initialize(model=torch.nn.Linear(2, 1), config=str(file))
    assert "line " in str(caught.value)  # places in the file are still known


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("key", ["offload_param", "cpu_offload_param"])
def test_parameters_are_not_offloaded_below_stage_3(stage, key):
    value = {"device": "cpu", "pin_memory": False} if key == "offload_param" else True
    config = BASE | {"zero_optimization": {"stage": stage, key: value}}
    engine, text = started(config)
    assert f"zero_optimization.{key} (nothing to offload at stage {stage})" in text
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    assert config["zero_optimization"] == {"stage": stage, key: value}
    engine.destroy()
    quiet = {"stage": stage, "offload_param": {"device": "none"}}
    assert started(BASE | {"zero_optimization": quiet})[1] == ""


def test_zero_init_reads_such_documents_too():
    config = BASE | {"mine": 1, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    with pytest.warns(dsx_compat.CompatWarning, match="mine, zero_optimization.offload_param"):
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=False):
            pass


def test_names_of_0_19_are_read():
    zero = {"stage": 3, "cpu_offload_param": True, "parameter_alignment": True}
    engine, text = started(BASE | {"zero_optimization": zero})
    assert text == "" and engine.config["zero_optimization"]["cpu_offload_params"] is True
    assert engine.optimizer.parameter_offload is not None
    engine.destroy()
    config = {
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2, "compute_grad_norm": False},
        "torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]},
    }
    engine, text = started(BASE | config)
    assert "torch_autocast.lower_precision_safe_modules (gradients are reduced in one data type" in text
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()


HJSON = """{
  # batches
  train_micro_batch_size_per_gpu: 2
  optimizer: {
    type: SGD        # not a comment in Hjson, but the name of an optimizer has no spaces
    params: {
      lr: 0.1,
      momentum: 0.5
    }
  }
  zero_optimization: {
    stage: 2
    overlap_comm: false
    reduce_bucket_size: 1e4
  }
  steps_per_print: null
  tensorboard: {
    enabled: false
    job_name: a name with spaces, and a comma
  }
}"""


def test_hjson_files_are_read(tmp_path):
    file = tmp_path / "ds.hjson"
    text = HJSON.replace("        # not a comment in Hjson, but the name of an optimizer has no spaces", "")
    file.write_text(text)
    engine, warning = started(str(file))
    assert warning == "" and engine.zero_optimization_stage() == 2 and engine.zero_overlap_comm() is False
    assert engine.zero_reduce_bucket_size() == 10_000 and engine.optimizer_params() == {"lr": 0.1, "momentum": 0.5}
    assert engine.config["tensorboard"]["job_name"] == "a name with spaces, and a comma"
    engine.destroy()
    file.write_text(text.replace("stage: 2", "stage: 2, stage: 3"))  # what is wrong is still said, with its place
    with pytest.raises(ValueError, match="given twice"):
        deepspeed.initialize(model=torch.nn.Linear(2, 1), config=str(file))
    file.write_text(text.replace("overlap_comm: false", "overlap_comm: False"))
    with pytest.raises(ValueError, match="line"):
        deepspeed.initialize(model=torch.nn.Linear(2, 1), config=str(file))


def test_hjson_is_read_for_deepspeed_s_programs_only(tmp_path):
    import dsx

    (tmp_path / "ds.json").write_text(HJSON)
    with pytest.raises(ValueError, match="a comma is missing"):
        dsx.initialize(model=torch.nn.Linear(2, 1), config=str(tmp_path / "ds.json"))


def test_an_unknown_warm_up_is_the_usual_one_and_is_named():
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "cubic"}}
    engine, text = started({**BASE, "scheduler": schedule})
    assert "scheduler.params.warmup_type ('cubic' is unknown, log is used)" in text
    assert engine.lr_scheduler.warmup.kind == "log" and schedule["params"]["warmup_type"] == "cubic"
