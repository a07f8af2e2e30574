"""DeepSpeed's checkpoints are imported, optimizer included, without running what is in them.

The files are written here in DeepSpeed's layout, from an engine of dsx that trained. What comes out of the import must
be what that engine has, and training must go on as it does. Real checkpoints of DeepSpeed 0.19.8 (stages 1 to 3, fp32
and bf16, two ranks) went on with DeepSpeed's own losses to 2e-7 when this was written; so did its stage 0, to the last
bit in fp32.
"""

import os
from collections import OrderedDict

import pytest
import torch
from dsx_checkpoint.command import main
from dsx_checkpoint.foreign.deepspeed import read_deepspeed
from dsx_checkpoint.foreign.deepspeed_stage0 import read_unnamed
from dsx_checkpoint.foreign.source import Tensor
from dsx_testkit.deepspeed_layout import (
    build,
    train,
    write_experts,
    write_plain,
    write_stage3,
    write_stage12,
    write_universal,
)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


WRITERS = {
    "stage 0": write_plain,
    "stage 0 fused": lambda e, root: write_plain(e, root, fused=True),
    "stage 1": lambda e, root: write_stage12(e, root, 1),
    "stage 2 without mappings": lambda e, root: write_stage12(e, root, 2, mapping=False),
    "stage 3": write_stage3,
    "universal": write_universal,
}


# - Importing it


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("kind", WRITERS)
def test_training_goes_on_as_it_would_have(tmp_path, kind, low):
    changes = {"bf16": {"enabled": True}} if low else {}
    engine = build(**changes)
    train(engine, 0, 3)
    folder = WRITERS[kind](engine, tmp_path / "deepspeed")
    weights, expected = engine.module_state_dict(), train(engine, 3, 3)
    assert main(["import", str(folder), str(tmp_path / "dsx"), "--new-tag", "a"]) == 0
    other = build(seed=4, optimizer={"type": "AdamW", "params": {"lr": 0.5}}, **changes)
    path, _ = other.load_checkpoint(tmp_path / "dsx")
    assert path is not None and other.global_steps == 3 and other.global_samples == 12
    got = other.module_state_dict()
    assert got.keys() == weights.keys() and all(torch.equal(got[name], value) for name, value in weights.items())
    assert other.get_lr() == [0.02]
    assert train(other, 3, 3) == expected


def test_loading_one_says_how_it_is_imported(tmp_path):
    from dsx_checkpoint import CheckpointError

    engine = build()
    train(engine, 0, 1)
    write_stage12(engine, tmp_path / "ds", 1)
    with pytest.raises(CheckpointError, match="dsx checkpoint import"):
        engine.load_checkpoint(tmp_path / "ds")


def test_the_state_of_the_caller_comes_along_and_nothing_is_run(tmp_path, caplog):
    engine = build()
    train(engine, 0, 1)
    extra = {"note": "here", "numbers": [1, 2.5], "evil": Evil(tmp_path / "run")}
    folder = write_stage12(engine, tmp_path / "ds", 2, extra=extra)
    assert main(["import", str(folder), str(tmp_path / "dsx")]) == 0
    _, client = build().load_checkpoint(tmp_path / "dsx")
    assert client == {"note": "here", "numbers": [1, 2.5]} and not (tmp_path / "run").exists()
    assert any("evil" in m for m in caplog.messages)


@pytest.mark.parametrize("damage", ["rank", "bytes", "short", "no module"])
def test_what_is_damaged_is_a_named_error_and_nothing_is_written(tmp_path, damage, capsys):
    engine = build()
    train(engine, 0, 1)
    folder = write_stage3(engine, tmp_path / "ds") / "global_step3"
    optim = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if damage == "rank":
        (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    elif damage == "bytes":
        optim.write_bytes(optim.read_bytes()[:-40])
    elif damage == "short":
        data = torch.load(optim, weights_only=False)
        data["optimizer_state_dict"]["fp32_flat_groups"] = [torch.zeros(3)]
        torch.save(data, optim)
    else:
        torch.save({}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert main(["import", str(tmp_path / "ds"), str(tmp_path / "dsx")]) == 1
    assert "dsx-checkpoint import: " in capsys.readouterr().err
    assert not (tmp_path / "dsx").exists() or not any(p.is_dir() for p in (tmp_path / "dsx").iterdir())


# - Model parallelism


def write_slices(root, info, slices):
    """Files of model-parallel ranks, weights alone."""
    for rank, module in enumerate(slices):
        head = {"module": module, "buffer_names": [], "optimizer": None, "universal_checkpoint_info": info}
        torch.save(head, root / f"mp_rank_{rank:02d}_model_states.pt")


INFO = {
    "tp_replicated_parameter_patterns": [r".*norm\.weight"],
    "parameter_to_average_patterns": [r"mean\..*"],
    "parameter_with_row_parallelism_patterns": [r".*dense\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*glu\.weight"],
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "original_vocab_size": 7,
}


def test_slices_go_together_by_the_patterns_of_universal_checkpoints(tmp_path):
    whole = {
        "norm.weight": torch.randn(4), "mean.w": torch.randn(3), "dense.weight": torch.randn(4, 6),
        "glu.weight": torch.randn(8, 2), "embed.weight": torch.randn(7, 3), "column.weight": torch.randn(6, 2),
    }  # fmt: skip
    padded = torch.cat([whole["embed.weight"], torch.zeros(1, 3)])
    gate, up = whole["glu.weight"].chunk(2)
    slices = [
        {
            "norm.weight": whole["norm.weight"], "mean.w": whole["mean.w"] + (1 if r else -1),
            "dense.weight": whole["dense.weight"].chunk(2, 1)[r], "embed.weight": padded.chunk(2)[r],
            "glu.weight": torch.cat([gate.chunk(2)[r], up.chunk(2)[r]]),
            "column.weight": whole["column.weight"].chunk(2)[r],
        }
        for r in range(2)
    ]  # fmt: skip
    write_slices(tmp_path, INFO, slices)
    found = read_deepspeed(tmp_path)
    for name, value in whole.items():
        torch.testing.assert_close(found.parameters[name].fetch(), value)
        assert found.parameters[name].shape == tuple(value.shape)


def test_slices_of_which_nothing_is_said_are_refused(tmp_path):
    from dsx_checkpoint import CheckpointError

    write_slices(tmp_path, None, [{"w": torch.ones(2)}, {"w": torch.ones(2)}])
    with pytest.raises(CheckpointError, match="'w' is on 2 model-parallel ranks"):
        read_deepspeed(tmp_path)


def test_layers_of_a_pipeline_and_experts_are_read(tmp_path):
    torch.save({"module": None, "buffer_names": []}, tmp_path / "mp_rank_00_model_states.pt")
    layers = [torch.nn.Linear(2, 2).state_dict() for _ in range(2)]
    for number, layer in enumerate(layers):
        torch.save(layer, tmp_path / f"layer_{number:02d}-model_00-model_states.pt")
    expert = {f"moe.deepspeed_experts.{e}.weight": torch.full((3,), float(e)) for e in range(2)}
    for e, (name, value) in enumerate(expert.items()):
        torch.save({name: value}, tmp_path / f"layer_0_expert_{e}_mp_rank_00_model_states.pt")
    found = read_deepspeed(tmp_path)
    assert set(found.parameters) == {"0.weight", "0.bias", "1.weight", "1.bias", *expert}
    assert torch.equal(found.parameters["1.bias"].fetch(), layers[1]["bias"])
    assert torch.equal(found.parameters["moe.deepspeed_experts.1.weight"].fetch(), torch.ones(3))


# - Which state belongs to which parameter, where nothing says so


def unnamed(shapes, groups, masters=False):
    """Parameters, and an optimizer's state dict whose groups have them as `groups` lists their numbers."""
    values = [torch.full(shape, float(n + 1)) for n, shape in enumerate(shapes)]
    numbers, order = [], [n for group in groups for n in group]
    for group in groups:
        numbers.append([order.index(n) for n in group])
    states = {order.index(n): {"exp_avg": values[n] * 10, "step": torch.tensor(2.0)} for n in order}
    saved = {"state": states, "param_groups": [{"lr": 0.1, "params": each} for each in numbers]}
    if masters:
        saved = {"optimizer_state_dict": saved, "fp32_groups": [[values[n] for n in group] for group in groups]}
    return {f"p{n}": Tensor.of(v.bfloat16() if masters else v) for n, v in enumerate(values)}, saved


def test_groups_are_told_apart_where_there_is_one_way_only():
    shapes = [(3, 4), (4,), (4,), (2, 4), (2,)]
    for groups, masters, known in (
        ([[0, 1, 2, 3, 4]], False, True),
        ([[0, 3], [1, 2, 4]], False, True),  # matrices decay, vectors do not
        ([[0, 1, 3], [2, 4]], False, False),  # which of the vectors of four elements decays?
        ([[0, 1, 3], [2, 4]], True, True),  # their masters say it
        ([[3, 0, 1, 2, 4]], False, False),  # not the model's order
    ):
        parameters, saved = unnamed(shapes, groups, masters)
        found = read_unnamed(saved, list(parameters), parameters)
        assert (found is not None) == known, groups
        for number, name in enumerate(parameters if found else ()):
            assert torch.equal(found.states[name]["exp_avg"].fetch(), torch.full(shapes[number], 10.0 * (number + 1)))


# - Experts


@pytest.mark.parametrize(
    "stage, world, neighbours", [(0, 2, False), (1, 2, False), (2, 4, False), (2, 4, True), (1, 2, True)]
)
def test_optimizer_states_of_experts_find_their_expert(tmp_path, stage, world, neighbours):
    low, moments = write_experts(tmp_path, stage, world, neighbours)
    head = torch.load(tmp_path / "mp_rank_00_model_states.pt")
    head["param_shapes"] = [OrderedDict((n, v.shape) for n, v in low.items())] if stage else None
    torch.save(head, tmp_path / "mp_rank_00_model_states.pt")
    found = read_deepspeed(tmp_path)
    assert found.parameters.keys() == low.keys()
    for name, moment in moments.items():
        assert torch.equal(found.states[name]["exp_avg"].fetch().reshape(moment.shape), moment), name
        assert found.states[name]["step"] == 2.0
        assert torch.equal(found.masters[name].fetch().reshape(moment.shape), low[name].float())


def test_experts_that_cannot_be_told_apart_begin_again(tmp_path, caplog):
    write_experts(tmp_path, 1, 2)
    for rank in range(2):
        path = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        saved = torch.load(path, weights_only=False)
        saved["optimizer_state_dict"]["single_partition_of_fp32_groups"][1] += 1  # other masters than the weights'
        torch.save(saved, path)
    found = read_deepspeed(tmp_path)
    assert not any("deepspeed_experts" in name for name in found.states) and "a.weight" in found.states
    assert any("states of experts cannot be told apart" in message for message in caplog.messages)
