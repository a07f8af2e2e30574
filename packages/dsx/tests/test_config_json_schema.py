"""The schema for editors agrees with the loader: what one takes is green in the other, what one refuses is red."""

import json

import jsonschema
import pytest
from dsx.config import DsxConfigError, load_config
from dsx.config.json_schema import json_schema

BATCH = {"train_micro_batch_size_per_gpu": 1}

GOOD = [
    {},
    {"$schema": "https://example.org/dsx.json"},
    {"train_batch_size": "auto"},
    {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto"}},
    {"zero_optimization": True},
    {"zero_optimization": {"stage": 2, "allgather_bucket_size": 5e8, "prefetch_bucket_size": "auto"}},
    {"zero_optimization": {"leaf_module": {"classes": "Expert"}}},
    {"fp16": None, "tensorboard": None},
    {"bfloat16": {"enabled": 1}},
    {"gradient_allreduce_op": "SUM", "checkpoint": {"tag_validation": "FAIL"}},
    {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}},
    {"optimizer": {"type": "adam", "params": {"lr": "auto", "betas": [0.9, 0.99], "torch_adam": True}}},
    {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 10}}, "gradient_clipping": 0.0},
    {"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9}}},
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": "auto"}}},
    {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": [1.0]}}},
    {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 5}}},
    {"scheduler": None, "optimizer": None},
]

BAD = [
    {"train_batch_size": 0},
    {"train_batch_size": 1.5},
    {"train_batch_sizes": 1},
    {"gradient_clipping": -1},
    {"gradient_clipping": "1.0"},
    {"zero_optimization": {"stage": 4}},
    {"zero_optimization": {"stages": 1}},
    {"zero_optimization": {"sub_group_size": 0}},
    {"zero_optimization": {"stage": 1, "zero_quantized_gradients_block_size": 6}},
    {"fp16": {"enabled": "yes"}},
    {"fp16": {"enabled": True, "initial_scale_power": 65}},
    {"gradient_allreduce_op": "average"},
    {"torch_autocast": {"dtype": "float8"}},
    {"optimizer": {"type": "Adamm"}},
    {"optimizer": {"type": "Adam", "params": {"lrr": 1}}},
    {"optimizer": {"type": "Adam", "params": {"lr": -1}}},
    {"optimizer": {"type": "ADAM", "params": {"betas": [0.9, 1.0]}}},
    {"optimizer": {"type": "RMSprop", "params": {"alfa": 0.9}}},
    {"optimizer": {"params": {"lr": 1}}},
    {"optimizer": {"type": "partial"}},
    {"scheduler": {"type": "Warmup"}},
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_step": 5}}},
    {"scheduler": {"type": "CosineAnnealingLR", "params": {"t_max": 5}}},
]


@pytest.fixture(scope="module")
def validator():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("document", GOOD, ids=json.dumps)
def test_what_the_loader_takes_is_green(validator, document):
    load_config({**BATCH, **document}, world_size=1)
    assert [error.message for error in validator.iter_errors({**BATCH, **document})] == []


@pytest.mark.parametrize("document", BAD, ids=json.dumps)
def test_what_the_loader_refuses_is_red(validator, document):
    with pytest.raises(DsxConfigError):
        load_config({**BATCH, **document}, world_size=1)
    assert not validator.is_valid({**BATCH, **document})


def test_every_key_has_a_text_and_every_limit_its_name():
    def objects(value):
        if isinstance(value, dict):
            yield value
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from objects(item)

    schema = json_schema()
    assert schema["properties"]["gradient_clipping"]["default"] == 1.0
    for name, value in schema["properties"].items():
        assert value["description"], name
    for value in objects(schema):
        assert not {"ge", "gt", "le", "lt"} & set(value), value


def test_what_is_not_there_yet_says_so_in_the_editor():
    properties = json_schema()["properties"]
    zero = json_schema()["$defs"]["ZeroConfig"]["properties"]
    assert "not available yet" in zero["zenflow"]["description"]
    assert "accepted without effect" in properties["vocabulary_size"]["description"]


def test_the_command_prints_the_schema(capsys):
    from dsx.config.cli import main

    assert main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["$schema"].endswith("2020-12/schema")
    assert printed["$id"].startswith("urn:dsx:config:")
