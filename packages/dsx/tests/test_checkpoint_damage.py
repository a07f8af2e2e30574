"""Damage is found before anything changes: flipped bytes, lost parts of the training state, states that are incomplete.

The engine trains in bf16, so that there are weights which a load does not read (it takes the masters); `dsx checkpoint
verify` reads them. 1000 flipped bytes are slow, a quarter of them is in the suite:

    pytest -m slow packages/dsx/tests/test_checkpoint_damage.py
"""

import json
import random
import shutil

import dsx
import pytest
import torch
from dsx.checkpoint import CheckpointCorruptError, CheckpointError, open_checkpoint
from dsx_checkpoint.command import main as checkpoint_command
from dsx_checkpoint.format import seal
from dsx_checkpoint.verifying import verify_all

FLIPS = [pytest.param(250, 3, id="250"), pytest.param(1000, 4, id="1000", marks=pytest.mark.slow)]
"""How many bytes are changed, and the seed."""


def build(seed=0, scheduler=True):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))
    config = {
        "train_batch_size": 3,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95]}},
        "steps_per_print": None,
    }
    if scheduler:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 9}}
    data = torch.utils.data.TensorDataset(torch.arange(40))
    return dsx.initialize(model=model, training_data=data, config=config)[0]


def train(engine, steps):
    for step in range(steps):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).to(next(engine.module.parameters()).dtype)
        engine.backward(engine(x).float().square().mean())
        engine.step()


def everything(engine):
    """Copies of all that a load may change."""
    tensors = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for part in engine.optimizer.slices(held=True):
        tensors[f"master/{part.name}"] = part.master.clone()
        tensors |= {f"{k}/{part.name}": torch.as_tensor(v).clone() for k, v in part.states.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    numbers = [
        vars(engine.counters),
        groups,
        engine._parts.update.schedule.state_dict(),
        engine._parts.update.scaler.state_dict(),
    ]
    return tensors, repr([*numbers, engine.training_dataloader.state_dict()])


def is_good(folder):
    try:
        reader = open_checkpoint(folder)
        verify_all(reader.folder, reader.index)
    except CheckpointError:
        return False
    return True


def same(one, other):
    return (
        one[1] == other[1]
        and one[0].keys() == other[0].keys()
        and all(torch.equal(one[0][k], other[0][k]) for k in one[0])
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint, of which tests damage copies."""
    folder = tmp_path_factory.mktemp("saved")
    engine = build(seed=1)
    train(engine, 3)
    next(iter(engine.training_dataloader))
    engine.save_checkpoint(folder, client_state={"note": "x", "t": torch.arange(4.0)})
    return folder


@pytest.fixture(scope="module")
def victim():
    """The engine that is asked to load damage."""
    engine = build(seed=2)
    train(engine, 1)
    return engine


@pytest.mark.parametrize(("flips", "seed"), FLIPS)
def test_every_flipped_byte_is_found_and_changes_nothing(saved, victim, tmp_path, flips, seed):
    engine, before = victim, everything(victim)
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    tag = open_checkpoint(folder).folder
    assert is_good(folder)
    chosen, unread = random.Random(seed), 0
    files = sorted(path for path in tag.iterdir() if path.name != "latest")
    assert {path.name for path in files} >= {
        "dsx.json",
        "model.safetensors",
        "optimizer.safetensors",
        "client.safetensors",
    }
    for number in range(flips):
        path = files[number % len(files)]
        original = path.read_bytes()
        damaged = bytearray(original)
        position = chosen.randrange(len(original))
        damaged[position] ^= 1 << chosen.randrange(8)
        path.write_bytes(damaged)
        where = f"{path.name} byte {position}: {original[position]:#x} -> {damaged[position]:#x}"
        assert not is_good(folder), where
        try:
            engine.load_checkpoint(folder)
        except CheckpointError:
            assert same(everything(engine), before), where
        else:
            assert path.name == "model.safetensors", where  # 16-bit weights whose masters were loaded
            unread += 1
            engine.load_checkpoint(saved)
            before = everything(engine)
        path.write_bytes(original)
    assert unread < flips // len(files)


def test_verify_names_the_file_and_a_good_checkpoint_is_good(saved, tmp_path, capsys):
    assert checkpoint_command(["verify", str(saved)]) == 0
    assert "global_step3: ok, 31 tensors in 3 files" in capsys.readouterr().out
    shutil.copytree(saved, tmp_path / "copy")
    path = tmp_path / "copy" / "global_step3" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert checkpoint_command(["verify", str(tmp_path / "copy"), "--tag", "global_step3"]) == 1
    said = capsys.readouterr().err
    assert "model.safetensors" in said and "not those that were saved" in said


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "client.safetensors", "dsx.json"])
@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b[: len(b) // 2], lambda b: b""])
def test_files_of_another_length_are_found(saved, victim, tmp_path, name, change):
    engine = victim
    before = everything(engine)
    shutil.copytree(saved, tmp_path / "copy")
    path = tmp_path / "copy" / "global_step3" / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path / "copy")
    assert same(everything(engine), before)


# - The training state: these have a right checksum, as if a program had written them


def without(key):
    return lambda state: state.pop(key)


def put(*path, value):
    def change(state):
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return change


DAMAGED_STATES = {
    "no counters": (without("counters"), "counters"),
    "a counter lost": (lambda s: s["counters"].pop("global_steps"), "global_steps"),
    "an unknown counter": (put("counters", "globah_samples", value=1), "globah_samples"),
    "a negative counter": (put("counters", "global_steps", value=-1), "global_steps"),
    "a counter that is no integer": (put("counters", "global_steps", value=1.5), "global_steps"),
    "a counter that is a boolean": (put("counters", "global_steps", value=True), "global_steps"),
    "counters that are a list": (put("counters", value=[1, 2]), "counters"),
    "an unknown key": (put("lr_schedules", value={}), "lr_schedules.*newer dsx"),
    "a rate that is text": (put("param_groups", 0, "lr", value="fast"), r"param_groups\[0\]\.lr"),
    "groups that are no list": (put("param_groups", value={"lr": 1}), "param_groups"),
    "a group that is no object": (put("param_groups", value=[3]), "param_groups"),
    "a schedule of another kind": (put("lr_scheduler", value={"T_max": 3}), "training state"),
    "a schedule that is text": (put("lr_scheduler", value="cosine"), "lr_scheduler"),
    "a scale that is zero": (put("loss_scaler", value={"kind": "dynamic", "scale": 0}), "loss_scaler.scale"),
    "a scale that is text": (put("loss_scaler", "scale", value="big"), "loss_scaler.scale"),
    "precision that is null": (put("precision", value=None), "precision"),
    "data without a position": (put("data", value={"seed": 0}), "training state"),
    "data that is a number": (put("data", value=3), "data"),
}


def change_state(folder, change):
    path = folder / "global_step3" / "dsx.json"
    data = json.loads(path.read_text())
    data.pop("checksum")
    change(data["state"])
    path.write_text(seal(data))


@pytest.mark.parametrize("name", DAMAGED_STATES)
def test_a_damaged_training_state_is_our_error_and_changes_nothing(saved, victim, tmp_path, name):
    engine = victim
    before = everything(engine)
    change, message = DAMAGED_STATES[name]
    shutil.copytree(saved, tmp_path / "copy")
    change_state(tmp_path / "copy", lambda state: change(state["engine"]))
    with pytest.raises(CheckpointCorruptError, match=message):
        engine.load_checkpoint(tmp_path / "copy")
    assert same(everything(engine), before)
    assert engine.load_checkpoint(tmp_path / "copy", load_module_only=True)[0] is not None  # the weights are good
    engine.load_checkpoint(saved)


@pytest.mark.parametrize("value", [None, 3, [], {}])
def test_a_training_state_that_is_none_is_our_error(saved, victim, tmp_path, value):
    engine = victim
    before = everything(engine)
    shutil.copytree(saved, tmp_path / "copy")
    change_state(tmp_path / "copy", lambda state: state.update(engine=value))
    with pytest.raises(CheckpointError, match="training state"):
        engine.load_checkpoint(tmp_path / "copy")
    assert same(everything(engine), before)


def test_a_schedule_that_fails_to_load_leaves_everything_as_it_was(saved, monkeypatch):
    engine = build(seed=7)
    before = everything(engine)
    schedule = engine._parts.update.schedule.scheduler
    load, now = schedule.load_state_dict, schedule.state_dict()

    def half(state):
        load(state)
        if state != now:  # the way back works
            raise KeyError("gone")

    monkeypatch.setattr(schedule, "load_state_dict", half)
    with pytest.raises(CheckpointCorruptError, match="gone"):
        engine.load_checkpoint(saved)
    assert same(everything(engine), before)


# - Optimizer states


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_a_lost_optimizer_state_is_an_error_and_changes_nothing(saved, tmp_path, key):
    engine = build(seed=4)
    before = everything(engine)
    other = build(seed=5)
    train(other, 2)
    for state in other.optimizer.state.values():
        state.pop(key)
    other.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=rf"0\.weight: got the optimizer states .*also keeps {key}"):
        engine.load_checkpoint(tmp_path)
    assert same(everything(engine), before)
    assert engine.load_checkpoint(tmp_path, load_optimizer_states=False)[0] is not None


def test_integers_do_not_become_floats(tmp_path):
    integers = torch.nn.BatchNorm1d(3)
    integers.running_mean = torch.arange(3)
    for name, module in (("integers", integers), ("floats", torch.nn.BatchNorm1d(3))):
        dsx.initialize(model=module, config={"train_batch_size": 1})[0].save_checkpoint(tmp_path, tag=name)
    engine = dsx.initialize(model=torch.nn.BatchNorm1d(3), config={"train_batch_size": 1})[0]
    with pytest.raises(CheckpointError, match=r"running_mean: I64 in the checkpoint, torch\.float32 in the model"):
        engine.load_checkpoint(tmp_path, tag="integers")
    assert engine.load_checkpoint(tmp_path, tag="floats")[0] is not None
