"""The types of the configuration: they agree with the model of the keys, and an editor marks a misspelt key."""

import json
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import dsx
import pytest
from dsx.config import load_config, typed
from dsx.config.sections import whole_model
from dsx.config.typing_source import class_name, source

WRITTEN = Path(typed.__file__)


def test_the_file_is_what_the_command_writes():
    """After a change of a key: `dsx config types > packages/dsx/src/dsx/config/typed.py`."""
    assert WRITTEN.read_text() == source()


def test_every_section_has_a_type_with_its_keys():
    root = whole_model()
    sections = root.model_json_schema()["$defs"]
    assert set(root.model_fields) == set(typing.get_type_hints(typed.Config))
    for name, section in sections.items():
        found = typing.get_type_hints(getattr(typed, class_name(name)))
        assert set(found) == set(section["properties"]), name
    assert len({class_name(name) for name in sections}) == len(sections), "two sections would share a type"


def test_a_typed_configuration_is_a_dictionary_that_loads():
    made = dsx.Config(
        train_micro_batch_size_per_gpu=4,
        optimizer=dsx.Optimizer(type="AdamW", params={"lr": 1e-3}),
        bf16=dsx.Bf16(enabled=True),
        zero_optimization=dsx.Zero(stage=3, offload_optimizer=dsx.OffloadOptimizer(device="cpu"), overlap_comm=None),
    )
    plain = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": None},
    }  # fmt: skip
    assert made == plain and json.loads(json.dumps(made)) == plain
    assert load_config(made, world_size=2).to_dict() == load_config(plain, world_size=2).to_dict()


def test_every_stage_and_no_other_is_a_type_of_its_own():
    allowed = typing.get_args(typing.get_type_hints(typed.Zero)["stage"])
    assert [typing.get_args(one) for one in allowed] == [(0, 1, 2, 3), ("auto",)]


def test_at_run_time_a_misspelt_key_is_refused_as_in_any_dictionary():
    with pytest.raises(dsx.DsxConfigError, match="stge"):
        load_config(dsx.Config(zero_optimization=dsx.Zero(stge=3)), world_size=1)  # pyright: ignore[reportCallIssue]


PROGRAM = """
import dsx

good = dsx.Config(train_batch_size=8, zero_optimization=dsx.Zero(stage=2, reduce_bucket_size="auto"))
also: dsx.Config = {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
engine = dsx.initialize(config=good)
engine = dsx.initialize(config={"train_batch_size": 8})
dsx.Config(zero_optimisation=dsx.Zero(stage=3))  # red
dsx.Zero(stge=3)  # red
dsx.Zero(stage=4)  # red
wrong: dsx.Config = {"zero_optimization": {"stge": 3}}  # red
dsx.OffloadOptimizer(device="gpu")  # red
dsx.Fp16(enabled="yes")  # red
"""


def test_pyright_marks_what_is_misspelt_and_nothing_else(tmp_path):
    pyright = Path(sys.executable).with_name("pyright")
    if not pyright.is_file() and shutil.which("pyright") is None:
        pytest.skip("pyright is not installed here")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    settings = {"include": [str(program)], "extraPaths": [str(WRITTEN.parents[2])], "reportMissingImports": True}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [str(pyright), "--outputjson", "-p", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    found = json.loads(done.stdout)["generalDiagnostics"]
    marked = sorted({one["range"]["start"]["line"] for one in found if one["severity"] == "error"})
    assert marked == [number for number, line in enumerate(PROGRAM.splitlines()) if line.endswith("# red")], found
