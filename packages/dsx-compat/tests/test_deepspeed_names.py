"""Every import path of public examples, documents and clients resolves. A name that dsx does not support raises an
error that says what to use instead.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import dsx_compat
import pytest
from dsx_compat.names import MODULES
from dsx_compat.unsupported import UNSUPPORTED, UNSUPPORTED_MODULES

dsx_compat.activate()
import deepspeed  # noqa: E402

# Import paths of public examples and tutorials (DeepSpeedExamples, deepspeed.ai, Hugging Face documents) and of the
# clients: Accelerate, transformers, peft, trl, Lightning.
PATHS = (Path(__file__).parent / "import_paths.txt").read_text().split()


def reach_by_attributes(path: str):
    """The value of a path, read attribute by attribute from `deepspeed`."""
    parts = path.split(".")
    value = deepspeed
    for part in parts[1:]:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("path", PATHS)
def test_public_import_path_resolves(path):
    value = reach_by_attributes(path)
    module, _, name = path.rpartition(".")
    while module not in MODULES:
        module, _, name = module.rpartition(".")
    scope: dict[str, object] = {}
    exec(f"from {module} import {name}", scope)
    assert scope[name] is getattr(importlib.import_module(module), name)
    assert value is not None


def test_every_name_of_the_tables_resolves():
    missing = []
    for module, names in MODULES.items():
        for name in names:
            try:
                getattr(importlib.import_module(module), name)
            except AttributeError as error:
                missing.append(str(error))
    assert missing == []


@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        ("from deepspeed import init_inference", "inference engine"),
        ("from deepspeed.sequence.fpdt_layer import FPDT_Attention", "sequence_attention"),
        ("from deepspeed.module_inject.replace_module import ReplaceWithTensorSlicing", "dsx_pipe.tensor"),
        ("from deepspeed.compile import init_z3", "not available yet"),
        ("from deepspeed import DualPipeVEngine", "'zbv'"),
        ("from deepspeed.checkpoint import DeepSpeedCheckpoint", "zero_to_fp32"),
        ("from deepspeed.checkpoint.deepspeed_checkpoint import DeepSpeedCheckpoint", "zero_to_fp32"),
        ("from deepspeed.compression.basic_layer import LinearLayer_Compress", "init_compression"),
        ("from deepspeed.launcher.multinode_runner import PDSHRunner", "--launcher pdsh"),
        ("from deepspeed.utils.comms_logging import CommsLogger", "log_summary"),
    ],
)
def test_an_unsupported_name_says_what_to_use(statement, advice):
    with pytest.raises(dsx_compat.NotSupportedError, match=advice) as caught:
        exec(statement, {})
    assert isinstance(caught.value, ImportError)


def test_the_advised_schedule_exists():
    from dsx_pipe.schedule import build

    for name in ("DualPipeVEngine", "DualPipeVModule"):
        advised = UNSUPPORTED["deepspeed"][name].split("'")[1]
        assert build(advised, ranks=2, micro_batches=2).stages == 4


def test_every_unsupported_name_gives_its_advice():
    for module, names in UNSUPPORTED.items():
        for name, advice in names.items():
            assert not hasattr(importlib.import_module(module), name)
            with pytest.raises(dsx_compat.NotSupportedError, match=name) as caught:
                exec(f"from {module} import {name}", {})
            assert advice in str(caught.value)
    for module, advice in UNSUPPORTED_MODULES.items():
        if module in MODULES:  # some of its names exist; the others give the advice
            module = f"{module}.other"
        with pytest.raises(dsx_compat.NotSupportedError) as caught:
            importlib.import_module(module)
        assert advice in str(caught.value)


def test_a_name_that_deepspeed_does_not_have_either_raises_an_ordinary_error():
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        deepspeed.initialise
    with pytest.raises(ImportError, match="initialise"):
        exec("from deepspeed import initialise", {})
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deepspeed.runtime.nothing")
    assert not hasattr(deepspeed, "init_inference")


def test_a_class_is_the_same_object_under_all_its_names():
    import dsx_comm
    import dsx_ops
    import dsx_pipe
    import dsx_zero

    assert issubclass(deepspeed.zero.GatheredParameters, dsx_zero.GatheredParameters)  # undoes edits with a warning
    assert deepspeed.runtime.zero.GatheredParameters is deepspeed.zero.GatheredParameters
    assert deepspeed.ops.adam.DeepSpeedCPUAdam is dsx_ops.CPUAdam
    assert deepspeed.pipe.PipelineModule is deepspeed.PipelineModule
    assert issubclass(deepspeed.PipelineModule, dsx_pipe.PipelineModule)
    assert deepspeed.comm.all_reduce is dsx_comm.all_reduce is deepspeed.dist.all_reduce


def test_a_value_that_a_program_assigns_stays(monkeypatch):
    from deepspeed.runtime.zero import partition_parameters

    replaced = lambda fn, *args, **kwargs: fn  # noqa: E731
    monkeypatch.setattr(partition_parameters, "zero_wrapper_for_fp_tensor_constructor", replaced)
    again = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    assert again.zero_wrapper_for_fp_tensor_constructor is replaced


def test_dir_lists_names_and_modules():
    assert {"initialize", "zero", "comm", "runtime"} <= set(dir(deepspeed))
    assert "WarmupLR" in dir(importlib.import_module("deepspeed.runtime.lr_schedules"))


@pytest.mark.parametrize(
    "module",
    [
        "deepspeed.launcher.runner",
        "deepspeed.env_report",
        "deepspeed.utils.zero_to_fp32",
        "deepspeed.checkpoint.ds_to_universal",
    ],
)
def test_modules_run_as_programs(module):
    code = "import dsx_compat, runpy, sys; dsx_compat.activate(); sys.argv = ['x', '--help']; "
    code += f"runpy.run_module({module!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "usage" in done.stdout, done.stderr
    assert done.returncode == 0


def test_torch_versions_are_compared_as_versions():
    import torch
    from deepspeed.utils.torch import required_torch_version

    release = torch.__version__.partition("+")[0]
    assert required_torch_version(min_version=2.9) and required_torch_version(min_version="1.13")
    assert required_torch_version(min_version=release, max_version=release)
    assert not required_torch_version(max_version=2.9) and not required_torch_version(min_version="99.1")
    with pytest.raises(ValueError, match="at least one"):
        required_torch_version()


def test_the_advised_launchers_exist():
    from dsx_launch.runners import BUILDERS

    advice = UNSUPPORTED_MODULES["deepspeed.launcher.multinode_runner"]
    named = advice.split("--launcher ")[1].split(";")[0].replace(" or ", ", ").split(", ")
    assert set(named) | {"ssh"} == set(BUILDERS)


def test_bandwidths_of_one_process():
    from deepspeed.utils.comms_logging import calc_bw_log, convert_size

    assert calc_bw_log("broadcast", 1_000_000, 2.0) == (4.0, 4.0)  # 8e6 bits in 2 ms
    assert calc_bw_log("all_reduce", 1_000_000, 2.0) == (8.0, 0.0)
    assert convert_size(1536) == "1.5 KB"


def test_a_missing_model_is_an_assertion_error_and_one_of_arguments():
    from dsx.engine import EngineArgumentError

    for expected in (AssertionError, EngineArgumentError):
        with pytest.raises(expected, match="got None, expected a"):
            deepspeed.initialize(model=None, config={"train_batch_size": 1})


def test_tiles_are_readable_by_row_and_column():
    from deepspeed.zero import TiledLinear

    layer = TiledLinear(6, 4, in_splits=3, out_splits=2)
    assert [[(tile.in_features, tile.out_features) for tile in row] for row in layer.linears] == [[(2, 2)] * 3] * 2
    assert not any(name.startswith("linears") for name, _ in layer.named_parameters())
