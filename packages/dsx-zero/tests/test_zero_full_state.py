"""The whole state as ordinary dictionaries: to another stage and number of ranks, from and to plain PyTorch, and what
torch's own functions for state dicts get.
"""

from __future__ import annotations

import copy

import dsx_zero
import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state

CONFIG = {"stage3_param_persistence_threshold": 12}


class Net(nn.Module):
    """Tied weights, a frozen layer in a group, a layer in no group, a scalar, running statistics, extra state."""

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
        self.extra = 1

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

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


def step(model, optimizer, number, rank=0, world=1):
    model.norm.eval()  # statistics of the whole batch would differ between the ranks
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(model.first.bias.dtype)
    model(x[4 // world * rank : 4 // world * (rank + 1)]).backward()
    optimizer.step()
    optimizer.zero_grad()


def built(stage, dtype, offload=False):
    model = Net().to(dtype)
    more = {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 256} if offload else {}
    return dsx_zero.shard(model, adamw(model), stage=stage, config={**CONFIG, **more})


def write(rank, world, path, stage, dtype, offload):
    model, optimizer = built(stage, dtype, offload)
    for number in range(3):
        step(model, optimizer, number, rank, world)
    with torch.no_grad():
        model.norm.running_mean.fill_(0.25)
    model.extra = 7
    state = dsx_zero.full_state_dict(optimizer)
    if rank > 0:
        assert state == {}
        return
    assert state["model"]["blocks.0.weight"].data_ptr() == state["model"]["blocks.1.weight"].data_ptr()
    assert len(state["masters"]) == (7 if dtype is torch.bfloat16 else 0)
    torch.save(state, path)


def read(rank, world, path, stage, dtype, offload):
    model, optimizer = built(stage, dtype, offload)
    saved = torch.load(path, mmap=True)
    dsx_zero.load_full_state_dict(optimizer, saved)
    assert model.extra == 7 and model.norm.running_mean[0] == 0.25 and optimizer.steps_done == 3
    again = dsx_zero.full_state_dict(optimizer, rank0_only=False)
    for part in ("model", "masters"):
        tensors = [(name, value) for name, value in saved[part].items() if isinstance(value, torch.Tensor)]
        assert all(torch.equal(again[part][name], value) for name, value in tensors), part
    assert again["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
    assert set(again["optimizer"]["state"]) == set(saved["optimizer"]["state"])
    for number, states in saved["optimizer"]["state"].items():
        assert all(torch.equal(again["optimizer"]["state"][number][key], value) for key, value in states.items())
    for number in range(3, 6):
        step(model, optimizer, number, rank, world)
    found = dsx_zero.full_state_dict(optimizer, rank0_only=False)["model"]
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, 2, False), (1, 1, False)),
        ((1, 2, False), (3, 4, True)),
        ((2, 1, True), (0, 2, False)),
        ((0, 1, 0), (2, 2, 1)),
    ],
)
def test_another_stage_and_number_of_ranks(tmp_path, before, after, dtype):
    path = tmp_path / "state.pt"
    run_ranks(write, before[1], path, before[0], dtype, before[2])
    (found, *_) = run_ranks(read, after[1], path, after[0], dtype, after[2])
    if dtype is torch.float32:
        plain = Net()
        optimizer = adamw(plain)
        for number in range(6):
            step(plain, optimizer, number)
            if number == 2:
                plain.norm.running_mean.fill_(0.25)
        expected = {name: p for name, p in plain.named_parameters(remove_duplicate=False)}
        assert_close_named(
            {n: found[n] for n in expected}, {n: p.detach() for n, p in expected.items()}, rtol=2e-4, atol=2e-5
        )


def test_from_plain_pytorch_and_back():
    plain = Net()
    optimizer = adamw(plain)
    for number in range(2):
        step(plain, optimizer, number)
    model, sharded = built(2, torch.float32)
    dsx_zero.load_full_state_dict(sharded, {"model": plain.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, sharded, 2)
    step(plain, optimizer, 2)
    state = dsx_zero.full_state_dict(sharded)
    other = Net()
    other.load_state_dict(state["model"])
    again = adamw(other)
    again.load_state_dict(state["optimizer"])
    step(plain, optimizer, 3)
    step(other, again, 3)
    assert_close_named(dict(other.named_parameters()), dict(plain.named_parameters()), rtol=1e-5, atol=1e-6)


def refused(rank, world):
    model, optimizer = built(3, torch.float32)
    step(model, optimizer, 0, rank, world)
    state = dsx_zero.full_state_dict(optimizer, rank0_only=False)
    other = {**state, "model": {**state["model"], "more": torch.ones(1)}}
    shape = {**state, "model": {**state["model"], "first.bias": torch.ones(3)}}
    groups = {**state, "optimizer": {**state["optimizer"], "param_groups": state["optimizer"]["param_groups"][:1]}}
    for wrong, match in (
        (other, "unexpected"),
        (shape, "first.bias: got shape"),
        (groups, "parameter groups"),
        ({}, "mmap"),
    ):
        given = wrong if rank == 1 else state
        with pytest.raises((dsx_zero.ZeroStateError, dsx_zero.RanksDifferError), match=match):
            dsx_zero.load_full_state_dict(optimizer, given)
    same = dsx_zero.full_state_dict(optimizer, rank0_only=False)
    assert all(torch.equal(v, same["model"][n]) for n, v in state["model"].items() if isinstance(v, torch.Tensor))
    step(model, optimizer, 1, rank, world)


def test_a_state_of_another_model_changes_nothing_on_any_rank():
    run_ranks(refused, 2)


def of_some(rank, world):
    import dsx_comm

    model = nn.ModuleDict({"dense": nn.Linear(4, 4), "expert": nn.Linear(4, 4)})
    for parameter in model["expert"].parameters():
        parameter.allreduce, parameter.group_name = False, "ep_size_2"
    dsx_comm.parallel_groups.create_expert_and_data_parallel(2)
    _, optimizer = dsx_zero.shard(model, torch.optim.AdamW, stage=2)
    with pytest.raises((dsx_zero.ZeroStateError, dsx_zero.RanksDifferError), match=r"expert.*only some ranks hold"):
        dsx_zero.full_state_dict(optimizer)


def test_experts_are_refused():
    run_ranks(of_some, 2)


# The optimizer that the user made, and torch's own functions ----------------------------------------------------------


def own_optimizer(rank, world, stage, dtype, path):
    model = Net().to(dtype)
    mine = adamw(model)
    model, optimizer = dsx_zero.shard(model, mine, stage=stage, config=CONFIG)
    for number in range(2):
        step(model, optimizer, number, rank, world)
    assert optimizer.optimizer is mine
    if stage > 0 and world > 1:
        for call in (mine.state_dict, lambda: mine.load_state_dict({"state": {}, "param_groups": []})):
            with pytest.raises(dsx_zero.ZeroStateError, match="full_state_dict"):
                call()
        with pytest.raises(dsx_zero.ZeroStateError, match="full_state_dict"):
            optimizer.state_dict()["state"]
        torch.save(optimizer.state_dict(), f"{path}{rank}")
        optimizer.load_state_dict(torch.load(f"{path}{rank}"))  # `weights_only` is the default
        return
    state = mine.state_dict()
    assert [len(group["params"]) for group in state["param_groups"]] == [4, 4]
    assert set(state["state"]) == {0, 2, 3, 4, 5, 6, 7}  # number 1 is frozen
    assert state["state"][0]["exp_avg"].shape == (10, 6)
    state = copy.deepcopy(state)
    trained = [p for p in model.parameters() if any(p is q for g in mine.param_groups for q in g["params"])]
    trained = [p for p in trained if p.requires_grad]
    before = [dsx_zero.safe_get_full_fp32_param(p) for p in trained]
    steps = []
    for _ in range(2):  # the same step twice, from the same values and states
        for parameter, value in zip(trained, before):
            dsx_zero.safe_set_full_fp32_param(parameter, value)
        mine.load_state_dict(copy.deepcopy(state))
        step(model, optimizer, 2, rank, world)
        steps.append([dsx_zero.safe_get_full_fp32_param(p) for p in trained])
    assert all(torch.equal(a, b) for a, b in zip(*steps)) and not torch.equal(steps[0][0], before[0])


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (2, 1), (0, 2), (1, 2), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_optimizer_that_the_user_made(tmp_path, stage, world, dtype):
    run_ranks(own_optimizer, world, stage, dtype, tmp_path / "local.pt")


def by_torch(rank, world, stage):
    model, optimizer = built(stage, torch.float32)
    plain = Net()
    reference = adamw(plain)
    for number in range(2):
        step(model, optimizer, number, rank, world)
        step(plain, reference, number)
    full = torch_state.StateDictOptions(full_state_dict=True)
    weights = torch_state.get_model_state_dict(model, options=full)
    wanted = torch_state.get_model_state_dict(plain)
    assert list(weights) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert type(weights[name]) is torch.Tensor
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    states = torch_state.get_optimizer_state_dict(model, optimizer, options=full)
    expected = torch_state.get_optimizer_state_dict(plain, reference)
    assert set(states["state"]) == set(expected["state"])
    for name, found in expected["state"].items():
        for key, value in found.items():
            torch.testing.assert_close(states["state"][name][key].reshape(value.shape), value, rtol=1e-3, atol=1e-6)
    assert [g["params"] for g in states["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    step(model, optimizer, 2, rank, world)
    torch_state.set_optimizer_state_dict(model, optimizer, copy.deepcopy(states))
    again = torch_state.get_optimizer_state_dict(model, optimizer, options=full)
    for name, found in states["state"].items():
        assert all(torch.equal(again["state"][name][key], value) for key, value in found.items())
    step(model, optimizer, 2, rank, world)


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (3, 2), (3, 1)])
def test_torchs_functions_for_state_dicts(stage, world):
    run_ranks(by_torch, world, stage)


@pytest.mark.parametrize("call", [dsx_zero.full_state_dict, lambda x: dsx_zero.load_full_state_dict(x, {})])
def test_a_model_in_the_place_of_the_optimizer_is_named(call):
    with pytest.raises(dsx_zero.ZeroOptimizerError, match=r"got Net, expected the optimizer that dsx_zero\.shard"):
        call(Net())
