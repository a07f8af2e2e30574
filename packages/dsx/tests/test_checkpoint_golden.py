"""Checkpoints that earlier versions of the format wrote still load, bit for bit, at their own layout and at another
one.

The files were written by `golden/make.py` with the dsx of their time. What the tensors must be stands beside them; it
was asked from the engine that saved, not read from the checkpoint.
"""

import functools
import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from dsx_testkit import run_ranks

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.with_suffix("") for path in GOLDEN.glob("v*/*.json"))
ELSEWHERE = {  # another number of ranks and stage than the checkpoint was written at
    "adamw-fp32-stage2-2ranks": (1, 0),
    "adamw-bf16-stage3-3ranks": (2, 1),
    "sgd-fp16-stage0-1rank": (3, 3),
    "onebitadam-fp32-stage0-2ranks": (1, 0),
}
RELATIVE = {"adamw-bf16-stage3-3ranks": 2e-2, "onebitadam-fp32-stage0-2ranks": 1e-3}


def makers():
    """The module `golden/make.py`, which is no part of any package."""
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def layout(case, where):
    """Ranks and stage at which a case is loaded."""
    spec = makers().CASES[case.name]
    return (spec["world"], spec["stage"]) if where == "same" else ELSEWHERE[case.name]


def resume_all(rank, world, loads):
    """Every load that is done by this number of ranks: starting ranks once is what keeps this file quick."""
    return [resume(rank, world, case, stage) for case, stage in loads]


@functools.lru_cache
def resumed(world):
    loads = {(case, where): layout(case, where) for case in CASES for where in ("same", "elsewhere")}
    mine = {key: stage for key, (ranks, stage) in loads.items() if ranks == world}
    return dict(zip(mine, run_ranks(resume_all, world, [(case, stage) for (case, _), stage in mine.items()])[0]))


def resume(rank, world, case, stage):
    make = makers()
    engine = make.build(case.name, stage)
    for parameter in engine.module.buffers():
        parameter.zero_()
    path, client = engine.load_checkpoint(str(case))
    tensors = make.state_of(engine, make.CASES[case.name]["states"])
    numbers = {
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "loss_scale": engine._parts.update.scaler.state_dict(),
        "groups": [{k: v for k, v in g.items() if k in ("lr", "betas", "weight_decay", "momentum")}
                   for g in engine.optimizer.param_groups],
        "data": None if engine.training_dataloader is None else engine.training_dataloader.state_dict(),
    }  # fmt: skip
    losses = make.train(engine, rank, world, make.STEPS, 2)
    engine.destroy()
    return path, client, tensors, numbers, losses


def same_structure(got, expected):
    """Equality of nested containers with tensors in them, types included."""
    assert type(got) is type(expected), (got, expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            same_structure(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected):
            same_structure(one, other)
    else:
        assert got == expected


@pytest.mark.parametrize("where", ["same", "elsewhere"])
@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_golden_checkpoint_loads(case, where):
    from safetensors.torch import load_file

    make = makers()
    spec, facts = make.CASES[case.name], json.loads(case.with_suffix(".json").read_text())
    expected = load_file(case.with_suffix(".safetensors"))
    path, client, tensors, numbers, losses = resumed(layout(case, where)[0])[case, where]
    assert Path(path) == case / "global_step4"
    assert set(tensors) == set(expected)
    for name, value in expected.items():
        assert tensors[name].shape == value.shape, name
        assert torch.equal(tensors[name].double(), value.double()), name
    same_structure(client, make.client_state() if spec.get("client") else {})
    assert numbers["counters"] == (4, 48, 0) and numbers["loss_scale"] == facts["loss_scale"]
    (group,) = numbers["groups"]
    assert [group["lr"]] == facts["lr"]
    for name, value in spec["optimizer"]["params"].items():
        if name in group and name != "lr":
            assert group[name] == (tuple(value) if isinstance(value, list) else value)
    if spec.get("data"):  # later versions may say more
        assert numbers["data"].items() >= {"seed": 0, "epoch": 0, "position": 12}.items()
    else:
        assert numbers["data"] is None
    if where == "same" and "scheduler" not in spec["more"]:
        assert losses == pytest.approx(facts["next_losses"], rel=RELATIVE.get(case.name, 1e-5))
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.glob("v*")))
def test_a_golden_checkpoint_of_several_files_reads(version):
    from dsx.checkpoint import open_checkpoint

    reader = open_checkpoint(GOLDEN / version / "split")
    assert reader.folder.name == "split" and len(list(reader.folder.glob("*.safetensors"))) == 6
    for i in range(5):
        value = torch.arange(24.0).view(6, 4) + 100 * i
        assert torch.equal(reader.whole(f"w{i}"), value)
        assert torch.equal(reader.state("exp_avg", f"w{i}", 5, 9), 2 * value.flatten()[5:9])
        assert reader.state("step", f"w{i}", 0, 24) == 3


# - Version 1 had no checksum of its index: what can be told from the rest must be


def lose(*path):
    def change(data):
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


def put(*path, value):
    def change(data):
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def lose_states(data):
    for name in [name for name in data["tensors"] if name.startswith("exp_avg_sq/")]:
        del data["tensors"][name], data["slices"][name]


DAMAGED_INDEXES = {
    "another file": put("tensors", "exp_avg/gain", "file", value="optimizes.safetensors"),
    "a file that is not there": put("tensors", "exp_avg/gain", "file", value="optimizer2.safetensors"),
    "another dtype of the same size": put("tensors", "gain", "dtype", value="I32"),
    "another shape of the same size": put("tensors", "inner.bias", "shape", value=[7, 1]),
    "another name": lambda d: d["tensors"].update(gaim=d["tensors"].pop("gain")),
    "another place": put("tensors", "gain", "offset", value=696),
    "a state of all parameters lost": lose_states,
    "steps lost": lose("scalars", "step"),
    "counters lost": lose("state", "engine", "counters"),
    "a counter of another name": lambda d: d["state"]["engine"]["counters"].update(globah_samples=1),
    "a slice lost": lambda d: d["slices"]["inner.bias"].pop(),
    "a slice twice": lambda d: d["slices"]["inner.bias"].append([4, 7, 1]),
    "very many empty slices": lambda d: d["slices"]["gain"].extend([[0, 0, 0]] * 100_000),
    "slices of nothing": lambda d: d["slices"].update(more=[]),
    "an unknown key": put("extra", value=1),
    "another hash": put("hash", value="md5"),
}


@pytest.mark.parametrize("name", DAMAGED_INDEXES)
def test_damage_in_an_index_without_a_checksum_is_found_where_it_contradicts_the_rest(tmp_path, name):
    from dsx.checkpoint import CheckpointError

    shutil.copytree(GOLDEN / "v1" / "adamw-fp32-stage2-2ranks", tmp_path / "copy")
    path = tmp_path / "copy" / "global_step4" / "dsx.json"
    data = json.loads(path.read_text())
    DAMAGED_INDEXES[name](data)
    path.write_text(json.dumps(data))
    make = makers()
    engine = make.build("adamw-fp32-stage2-2ranks", 0)
    before = make.state_of(engine, [])
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path / "copy")
    after = make.state_of(engine, [])
    assert all(torch.equal(before[key], after[key]) for key in before) and engine.global_steps == 0
    engine.destroy()
