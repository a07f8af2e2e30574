"""`zero_to_fp32`, `zero_to_torch` and `ds_to_universal`: what their functions and commands give from checkpoints of
DeepSpeed and of dsx.
"""

import os
import subprocess
import sys

import pytest
import torch
from dsx_testkit.deepspeed_layout import RANKS, Model, build, train, write_stage3, write_stage12


def test_the_functions_of_zero_to_fp32(tmp_path):
    from dsx_checkpoint import CheckpointError
    from dsx_compat.checkpoint import zero_to_fp32 as scripts

    engine = build(bf16={"enabled": True})
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path / "dsx")
    write_stage3(engine, tmp_path / "ds")
    masters = {p.name: p.master.reshape(p.shape).float() for p in engine.optimizer.slices(held=True) if p.trainable}
    for folder in (tmp_path / "dsx", tmp_path / "ds"):
        found = scripts.get_fp32_state_dict_from_zero_checkpoint(folder)
        assert set(found) == set(engine.module.state_dict()) and found["a.weight"] is not None
        assert all(torch.equal(found[name], value) for name, value in masters.items())
        assert torch.equal(found["tied.weight"], masters["a.weight"])
        lazy = scripts.get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
        assert len(lazy) == len(found) and torch.equal(lazy["b.bias"], masters["b.bias"])
        model = scripts.load_state_dict_from_zero_checkpoint(Model(), folder)
        assert all(torch.equal(model.get_parameter(name), value) for name, value in masters.items())
        out = tmp_path / f"{folder.name}-out"
        assert scripts.main([str(folder), str(out)]) == 0
        assert torch.equal(torch.load(out / "pytorch_model.bin", weights_only=True)["b.weight"], masters["b.weight"])
        assert scripts.main([str(folder), str(out)]) == 1  # it is there already
    with pytest.raises(CheckpointError, match="does not fit the model"):
        scripts.load_state_dict_from_zero_checkpoint(torch.nn.Linear(2, 2), tmp_path / "ds")
    assert len(scripts.get_optim_files(tmp_path / "ds" / "global_step3")) == RANKS
    assert scripts.get_model_state_file(tmp_path / "ds" / "global_step3", 3).endswith(
        "zero_pp_rank_0_mp_rank_00_model_states.pt"
    )
    with pytest.raises(CheckpointError, match="expected a tag's folder of DeepSpeed or of dsx"):
        scripts.get_optim_files(tmp_path / "dsx")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_program_that_reads_the_files_of_rank_0_itself_finds_the_callers_state(tmp_path, stage):
    """As Lightning's conversion to fp32 does: with `torch.load`, which allows no code."""
    from dsx_compat.checkpoint.zero_to_fp32 import (
        get_fp32_state_dict_from_zero_checkpoint,
        get_model_state_file,
        get_optim_files,
    )

    engine = build(bf16={"enabled": True}, zero_optimization={"stage": stage})
    train(engine, 0, 2)
    client = {"epoch": 3, "hyper_parameters": {"rate": 0.1}, "loops": [1, (2, 3)], "average": torch.arange(3.0)}
    engine.save_checkpoint(tmp_path, tag="epoch=3-step=2", client_state=client)
    before = sorted(path.name for path in (tmp_path / "epoch=3-step=2").iterdir())
    tag = str(tmp_path / (tmp_path / "latest").read_text())
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), None)
    (first,) = get_optim_files(tag)
    assert torch.load(first)["optimizer_state_dict"]["zero_stage"] == stage
    file = get_model_state_file(tag, stage)
    head = torch.load(file)
    assert head["module"] is None and head["global_steps"] == 2 and head["skipped_steps"] == 0
    assert torch.equal(head.pop("average"), client.pop("average"))
    assert {key: head[key] for key in client} == client
    assert set(weights) == set(engine.module.state_dict())
    assert sorted(path.name for path in (tmp_path / "epoch=3-step=2").iterdir()) == before
    assert not file.startswith(str(tmp_path))


def test_stand_ins_are_removed_with_the_process(tmp_path):
    engine = build()
    engine.save_checkpoint(tmp_path, tag="a")
    code = (
        "import sys; from dsx_compat.checkpoint.zero_to_fp32 import get_model_state_file, get_optim_files\n"
        "print(get_optim_files(sys.argv[1])[0], get_model_state_file(sys.argv[1], 0))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, env=environment).stdout
    assert said.count(str(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]


@pytest.mark.parametrize("ranks", [1, 12, 101])
def test_files_of_optimizer_states_come_in_the_order_of_the_ranks(tmp_path, ranks):
    from dsx_compat.checkpoint.zero_to_fp32 import get_optim_files

    expected = [str(tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in range(ranks)]
    for name in reversed(expected):
        open(name, "w").close()
    assert get_optim_files(tmp_path) == expected


def test_the_command_and_the_function_that_round_to_16_bits(tmp_path, capsys):
    from dsx_checkpoint import CheckpointArgumentError
    from dsx_compat.checkpoint.zero_to_fp32 import convert_zero_checkpoint_to_state_dict
    from dsx_compat.checkpoint.zero_to_torch import main as zero_to_torch

    engine = build(bf16={"enabled": True})
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path / "dsx")
    masters = {p.name: p.master.reshape(p.shape).float() for p in engine.optimizer.slices(held=True) if p.trainable}
    assert zero_to_torch([str(tmp_path / "dsx"), str(tmp_path / "out"), "--dtype", "float16"]) == 0
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(found[name], value.half()) for name, value in masters.items())
    assert found["table"].dtype == torch.int64
    convert_zero_checkpoint_to_state_dict(tmp_path / "dsx", tmp_path / "safe", torch.bfloat16, safe_serialization=True)
    assert (tmp_path / "safe" / "model.safetensors").is_file()
    with pytest.raises(CheckpointArgumentError, match=r"got torch\.int8, expected one of bf16"):
        convert_zero_checkpoint_to_state_dict(tmp_path / "dsx", tmp_path / "none", torch.int8)
    with pytest.raises(SystemExit):
        zero_to_torch([str(tmp_path / "dsx"), str(tmp_path / "none")])
    assert "--dtype" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_the_command_for_universal_checkpoints(tmp_path):
    from dsx_compat.checkpoint.ds_to_universal import main as convert

    engine = build()
    train(engine, 0, 3)
    write_stage12(engine, tmp_path / "ds", 1)
    words = ["--input_folder", str(tmp_path / "ds" / "global_step3"), "--output_folder", str(tmp_path / "out" / "uni")]
    assert convert(words) == 0
    other = build(seed=3, checkpoint={"load_universal": True}, zero_optimization={"stage": 3})
    other.load_checkpoint(tmp_path / "out", tag="uni")
    assert train(other, 3, 2) == pytest.approx(train(engine, 3, 2), rel=1e-6)
