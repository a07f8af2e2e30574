"""`save` and `load`: a folder that another stage, another number of ranks, plain PyTorch and FSDP2 go on from."""

from __future__ import annotations

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_checkpoint import CheckpointCorruptError, CheckpointError, load_training, open_checkpoint, save_training
from dsx_testkit import assert_close_named, run_ranks
from torch import nn

CONFIG = {"stage3_param_persistence_threshold": 12}
STEPS, ROWS = 3, 12


class Net(nn.Module):
    """Tied weights, a frozen layer in a group, a layer in no group, a scalar, running statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.blocks[1].weight = self.blocks[0].weight
        self.frozen, self.other = nn.Linear(10, 10), nn.Linear(10, 3)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm.eval()  # statistics of the whole batch would differ between the ranks

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (self.other(self.frozen(x)) * self.scale).float().square().mean()


def adamw(model):
    groups = [
        {"params": [model.first.weight, model.frozen.weight, model.blocks[0].weight, model.norm.weight]},
        {"params": [model.scale, model.first.bias, model.blocks[1].bias, model.norm.bias], "lr": 0.01},
    ]
    return torch.optim.AdamW(groups, lr=0.03, weight_decay=0.1)


def train(model, optimizer, numbers, rank=0, world=1):
    for number in numbers:
        x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(number))
        model(x.to(model.first.bias.dtype)[ROWS // world * rank : ROWS // world * (rank + 1)]).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(stage, dtype=torch.float32, offload=False, **more):
    model = Net().to(dtype)
    where = {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 256} if offload else {}
    return dsx_zero.shard(model, adamw(model), stage=stage, config={**CONFIG, **where, **more})


def values(optimizer):
    """Model, masters and states, whole, on every rank."""
    state = dsx_zero.full_state_dict(optimizer, rank0_only=False)
    found = {f"model {n}": v for n, v in state["model"].items()} | {
        f"master {n}": v for n, v in state["masters"].items()
    }
    for number, states in state["optimizer"]["state"].items():
        found |= {f"{number} {key}": value for key, value in states.items()}
    return found


def write(rank, world, folder, stage, dtype, offload):
    model, optimizer = sharded(stage, dtype, offload)
    train(model, optimizer, range(STEPS), rank, world)
    model.norm.running_mean.fill_(0.25)
    optimizer.param_groups[1]["lr"] = 0.02
    made = dsx_zero.save(folder, "three", model, optimizer, state={"step": STEPS, "note": torch.arange(3)})
    assert made == folder / "three"
    return values(optimizer)


def read(rank, world, folder, stage, dtype, offload):
    model, optimizer = sharded(stage, dtype, offload)
    loaded = dsx_zero.load(folder, model, optimizer)
    assert loaded.state["step"] == STEPS and loaded.state["note"].tolist() == [0, 1, 2]
    assert model.norm.running_mean[0] == 0.25 and optimizer.steps_done == STEPS
    assert [group["lr"] for group in optimizer.param_groups] == [0.03, 0.02]
    found = values(optimizer)
    train(model, optimizer, range(STEPS, 2 * STEPS), rank, world)
    return found, {n: v for n, v in values(optimizer).items() if n.startswith("model ")}


def plain():
    """The run that was not interrupted, in plain PyTorch."""
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer, range(STEPS))
    model.norm.running_mean.fill_(0.25)
    optimizer.param_groups[1]["lr"] = 0.02
    train(model, optimizer, range(STEPS, 2 * STEPS))
    return {f"model {name}": p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [
        ((3, 2, False), (1, 1, False), torch.float32),
        ((1, 2, False), (3, 3, True), torch.float32),
        ((0, 2, False), (3, 2, False), torch.float32),
        ((2, 1, True), (0, 2, False), torch.bfloat16),
        ((3, 3, False), (2, 2, True), torch.bfloat16),
    ],
)
def test_another_stage_and_number_of_ranks(tmp_path, before, after, dtype):
    (saved, *_) = run_ranks(write, before[1], tmp_path, before[0], dtype, before[2])
    ((found, trained), *_) = run_ranks(read, after[1], tmp_path, after[0], dtype, after[2])
    assert found.keys() == saved.keys() and len(found) > 20
    assert [name for name in saved if not torch.equal(found[name], saved[name])] == []
    if dtype is torch.float32:
        expected = plain()
        assert_close_named({name: trained[name] for name in expected}, expected, rtol=2e-4, atol=2e-5)


def test_plain_pytorch_goes_on_and_comes_back(tmp_path):
    run_ranks(write, 2, tmp_path, 3, torch.float32, False)
    model = Net()
    optimizer = adamw(model)
    loaded = load_training(tmp_path, model, optimizer)
    assert loaded.state["step"] == STEPS
    train(model, optimizer, range(STEPS, 2 * STEPS))
    assert_close_named(
        {f"model {name}": p.detach() for name, p in model.named_parameters(remove_duplicate=False)},
        plain(), rtol=2e-4, atol=2e-5,
    )  # fmt: skip
    save_training(tmp_path, "six", model, optimizer, state={"step": 6})
    back, shards = sharded(2)
    assert dsx_zero.load(tmp_path, back, shards).state == {"step": 6}
    assert dsx_zero.load(tmp_path, back, shards, tag="three").state["step"] == STEPS


def mistakes(rank, world, folder):
    model, optimizer = sharded(3)
    assert dsx_zero.load(folder / "nothing here", model, optimizer) is None
    train(model, optimizer, range(1), rank, world)
    dsx_zero.save(folder, "one", model, optimizer)
    before = values(optimizer)
    other, _ = sharded(2)
    # One rank alone gives the wrong model: all raise, none waits.
    with pytest.raises(dsx_zero.ZeroOptimizerError, match=r"rank 1 failed.*the optimizer of another model"):
        dsx_zero.save(folder, "two", other if rank == 1 else model, optimizer)
    with pytest.raises(dsx_zero.ZeroOptimizerError, match=r"got AdamW as the optimizer.*save_training"):
        dsx_zero.save(folder, "two", model, optimizer.inner)
    with pytest.raises(dsx_zero.ZeroOptimizerError, match=r"got a model first.*load_weights\(model, path\)"):
        dsx_zero.load(model, optimizer, folder)
    with pytest.raises(CheckpointError, match="two"):
        dsx_zero.load(folder, model, optimizer, tag="two")
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["one"]
    after = values(optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    train(model, optimizer, range(1, 2), rank, world)


def test_mistakes_are_named_on_all_ranks_and_change_nothing(tmp_path):
    run_ranks(mistakes, 2, tmp_path)


def with_an_expert(rank, world, folder):
    model = nn.ModuleDict({"dense": nn.Linear(4, 4), "expert": nn.Linear(4, 4)})
    for parameter in model["expert"].parameters():
        parameter.allreduce, parameter.group_name = False, "ep_size_2"
    dsx_comm.parallel_groups.create_expert_and_data_parallel(2)
    model, optimizer = dsx_zero.shard(model, torch.optim.AdamW, stage=1)
    for call in (
        lambda: dsx_zero.save(folder, "one", model, optimizer),
        lambda: dsx_zero.load(folder, model, optimizer),
    ):
        with pytest.raises(dsx_zero.ZeroStateError, match=r"expert.*only some ranks hold"):
            call()
    assert list(folder.iterdir()) == []


def test_experts_are_refused(tmp_path):
    run_ranks(with_an_expert, 2, tmp_path)


def damaged(rank, world, folder):
    model, optimizer = sharded(2)
    before = values(optimizer)
    with pytest.raises(CheckpointCorruptError):
        dsx_zero.load(folder, model, optimizer)
    after = values(optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items()) and optimizer.steps_done == 0


def test_a_damaged_file_is_told_before_anything_changes(tmp_path):
    run_ranks(write, 2, tmp_path, 3, torch.float32, False)
    assert open_checkpoint(tmp_path).whole("first.weight").shape == (10, 6)
    (path,) = sorted((tmp_path / "three").rglob("*.safetensors"))[:1]
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    run_ranks(damaged, 2, tmp_path)
