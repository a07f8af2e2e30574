"""What published configurations write in another way than the documentation, and what it is read as."""

import json

import pytest
import torch
from dsx.config import DsxConfigError, load_config

BATCH = {"train_micro_batch_size_per_gpu": 1}


def load(**keys):
    return load_config({**BATCH, **keys}, world_size=1)


@pytest.mark.parametrize(
    ("keys", "read", "expected"),
    [
        ({"checkpoint": {"tag_validation": "FAIL"}}, lambda c: c.checkpoint.tag_validation, "Fail"),
        ({"checkpoint": {"tag_validation": "ignore"}}, lambda c: c.checkpoint.tag_validation, "Ignore"),
        ({"gradient_allreduce_op": "SUM"}, lambda c: c.gradient_allreduce_op, "sum"),
        ({"zero_allow_untested_optimizer": 1}, lambda c: c.zero_allow_untested_optimizer, True),
        ({"fp16": {"enabled": 0}}, lambda c: c.fp16.enabled, False),
        ({"zero_optimization": {"overlap_comm": 0}}, lambda c: c.zero.overlap_comm, False),
        (
            {"zero_optimization": {"leaf_module": {"classes": "Expert"}}},
            lambda c: list(c.zero.leaf_module.classes), ["Expert"],
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, lambda c: c.precision.compute, "bf16"),
        ({"steps_per_print": 1}, lambda c: c.steps_per_print, 1),
        ({"zero_optimization": {"stage": 1}}, lambda c: c.zero.stage, 1),
        ({"$schema": "https://example.org/dsx.json"}, lambda c: c.batch.micro, 1),
    ],
)  # fmt: skip
def test_the_spelling_is_read(keys, read, expected):
    value = read(load(**keys))
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    "keys",
    [
        {"bf16": {"enabled": 2}},
        {"bf16": {"enabled": "true"}},
        {"bf16": {"enabled": 1.0}},
        {"gradient_allreduce_op": "average"},
        {"zero_optimization": {"stage": True}},
        {"zero_optimization": {"leaf_module": {"classes": 3}}},
        {"$schema": 3},
        {"fp16": {"$schema": "x"}},
    ],
)
def test_nothing_else_is_read(keys):
    with pytest.raises(DsxConfigError):
        load(**keys)


def test_keys_without_quotes_are_read_as_deepspeed_reads_them(tmp_path):
    file = tmp_path / "dsx.json"
    file.write_text("{ # ZeRO\n  train_batch_size: 4,\n  zero_optimization: {stage: 2},\n}")
    config = load_config(file, world_size=2)
    assert (config.batch.train, config.batch.micro, config.zero.stage) == (4, 2, 2)
    file.write_text("{train_batch_size: 4, stag: 2}")
    with pytest.raises(DsxConfigError, match="line 1, column 23"):
        load_config(file, world_size=1)


def test_a_predivide_factor_beside_prescaling_is_said_to_have_no_effect():
    config = load(prescale_gradients=True, gradient_predivide_factor=4.0)
    assert any("gradient_predivide_factor 4 has no effect" in text for text in config.warnings)
    assert not any("predivide" in text for text in load(gradient_predivide_factor=4.0).warnings)


def test_devices_named_in_the_file_are_said_to_mean_nothing():
    (text,) = [text for text in load(cuda_visible_devices="0,1").warnings if "cuda_visible_devices" in text]
    assert "--include" in text


def test_a_quantisation_period_of_zero_is_read():
    group = {"wq1": {"params": {"start_bits": 8, "target_bits": 8, "quantization_period": 0}}}
    shared = {"enabled": False}
    section = {"weight_quantization": {"shared_parameters": shared, "different_groups": group}}
    groups = load(compression_training=section).compression_training.weight_quantization.different_groups
    assert groups["wq1"].params.quantization_period == 0


@pytest.mark.parametrize(
    "given",
    [
        {"train_micro_batch_size_per_gpu": "auto"},
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
    ],
)
def test_batch_sizes_left_to_another_program_pass_the_check_and_not_the_training(given, tmp_path, capsys):
    from dsx.config.cli import main

    with pytest.raises(DsxConfigError, match="Hugging Face Trainer do this before training"):
        load_config(given, world_size=1)
    file = tmp_path / "dsx.json"
    file.write_text(json.dumps(given))
    assert main(["check", str(file)]) == 0
    shown = capsys.readouterr()
    assert shown.out.endswith(f"{file}: ok\n")
    assert shown.out.startswith("train_")
    assert "it is taken as 1 here. Training needs a number" in shown.err


def test_auto_is_computed_where_one_number_is_there():
    config = load_config({"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"}, world_size=2)
    assert config.batch.micro == 4 and not config.warnings


def test_bf16_with_autocast_trains_with_fp32_where_autocast_wants_it():
    import dsx

    settings = {
        **BATCH,
        "bf16": {"enabled": True},
        "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": None,
    }
    seen = {}

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            hidden = self.linear(x)
            loss = torch.nn.functional.cross_entropy(hidden, torch.zeros(2, dtype=torch.long))
            seen["weight"], seen["hidden"], seen["loss"] = self.linear.weight.dtype, hidden.dtype, loss.dtype
            return loss

    engine = dsx.initialize(model=Model(), config=settings)[0]
    before = engine.module.linear.weight.detach().clone()
    engine.backward(engine(torch.ones(2, 4)))
    engine.step()
    assert seen == {"weight": torch.bfloat16, "hidden": torch.bfloat16, "loss": torch.float32}
    assert not torch.equal(before, engine.module.linear.weight)


@pytest.mark.parametrize("autocast", ["float16", "torch.float16"])
def test_another_type_inside_autocast_than_the_mode_is_refused(autocast):
    with pytest.raises(DsxConfigError, match="bf16 and torch_autocast cannot be combined"):
        load(bf16={"enabled": True}, torch_autocast={"enabled": True, "dtype": autocast})
