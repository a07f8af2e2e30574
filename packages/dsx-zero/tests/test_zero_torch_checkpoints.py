"""`torch.distributed.checkpoint` and its `state_dict` functions on a running program, from and to FSDP2."""

from __future__ import annotations

import copy

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

WHOLE = {"stage3_param_persistence_threshold": 0}


class Net(nn.Module):
    """Odd sizes, tied weights, a layer that is small enough to be owned by one rank only."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 3)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.blocks[1].weight = self.blocks[0].weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def train(model, optimizer, rank, first, last):
    for number in range(first, last):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * number + rank))
        model(x.to(model.first.bias.dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model):
    found = {}
    for name, value in model.state_dict().items():
        found[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    return found


def by_fsdp(world, seed=0):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, adamw(model.parameters())


def by_dsx(stage, seed=0, *, dtype=torch.float32, offload=False, config=WHOLE):
    more = {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 16} if offload and stage else {}
    return dsx_zero.shard(Net(seed).to(dtype), adamw, stage=stage, config={**config, **more})


def save(model, optimizer, path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)


def load(model, optimizer, path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def compare(found, expected, tolerance):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def with_fsdp(rank, world, path, stage, offload, config):
    model, optimizer = by_fsdp(world)
    train(model, optimizer, rank, 0, 3)
    save(model, optimizer, path / "fsdp")
    train(model, optimizer, rank, 3, 6)
    expected = values(model)

    model, optimizer = by_dsx(stage, seed=1, offload=offload, config=config)
    load(model, optimizer, path / "fsdp")
    train(model, optimizer, rank, 3, 6)
    compare(values(model), expected, 1e-6)

    model, optimizer = by_dsx(stage, offload=offload, config=config)
    train(model, optimizer, rank, 0, 3)
    save(model, optimizer, path / "dsx")
    train(model, optimizer, rank, 3, 6)
    expected = values(model)
    model, optimizer = by_fsdp(world, seed=2)
    load(model, optimizer, path / "dsx")
    train(model, optimizer, rank, 3, 6)
    compare(values(model), expected, 1e-6)

    model, optimizer = by_dsx((stage + 1) % 4, seed=3, config=config)  # which has states of its own
    train(model, optimizer, rank, 7, 8)
    load(model, optimizer, path / "dsx")
    train(model, optimizer, rank, 3, 6)
    compare(values(model), expected, 1e-6)


@pytest.mark.parametrize(
    ("stage", "offload", "config"),
    [(0, False, WHOLE), (1, True, WHOLE), (2, False, WHOLE), (3, False, WHOLE), (3, True, WHOLE), (3, False, {})],
    ids=["0", "1-offload", "2", "3", "3-offload", "3-small-whole"],
)
def test_folders_of_fsdp2_and_back(tmp_path, stage, offload, config):
    run_ranks(with_fsdp, 2, tmp_path, stage, offload, config)


def reload_16_bit(rank, world, path, stage):
    """The masters' low bits are in the folder."""
    model, optimizer = by_dsx(stage, dtype=torch.bfloat16)
    train(model, optimizer, rank, 0, 3)
    save(model, optimizer, path)
    train(model, optimizer, rank, 3, 6)
    expected = dsx_zero.full_state_dict(optimizer, rank0_only=False)
    model, optimizer = by_dsx((stage + 2) % 4, seed=1, dtype=torch.bfloat16)
    train(model, optimizer, rank, 7, 8)
    load(model, optimizer, path)
    train(model, optimizer, rank, 3, 6)
    found = dsx_zero.full_state_dict(optimizer, rank0_only=False)
    compare(found["masters"], expected["masters"], 0)
    compare(found["model"], expected["model"], 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_16_bit_models_go_on_bit_for_bit(tmp_path, stage):
    run_ranks(reload_16_bit, 2, tmp_path / "saved", stage)


def only_weights(rank, world, path, stage, how):
    """A folder of weights is read into a model in use, by each of the ways that its users write."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, optimizer = by_dsx(stage, dtype=torch.bfloat16)
    train(model, optimizer, rank, 0, 2)
    dcp.save({"model": model.state_dict()} if how == "direct" else {"model": model}, checkpoint_id=path)
    expected = values(model)
    model, optimizer = by_dsx(stage, seed=1, dtype=torch.bfloat16)
    train(model, optimizer, rank, 7, 9)
    if how == "direct":
        dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    elif how == "stateful":
        dcp.load({"model": model}, checkpoint_id=path)
    else:
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=path)
        if how == "set":
            set_model_state_dict(model, state["model"])
    compare(values(model), expected, 0)
    optimizer.param_groups[0]["lr"] = 0.0  # the step writes what the masters are
    train(model, optimizer, rank, 5, 6)
    compare(values(model), expected, 0)


@pytest.mark.parametrize("how", ["direct", "stateful", "get", "set"])
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_alone(tmp_path, stage, how):
    run_ranks(only_weights, 2, tmp_path / "saved", stage, how)


def stateful(rank, world, path, stage):
    """`dcp.save({"model": model, "optimizer": optimizer})`, without any other function."""
    import torch.distributed.checkpoint as dcp

    model, optimizer = by_dsx(stage)
    train(model, optimizer, rank, 0, 3)
    optimizer.param_groups[0]["lr"] = 0.02
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    train(model, optimizer, rank, 3, 5)
    expected = values(model)
    model, optimizer = by_dsx(stage, seed=1)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    assert optimizer.param_groups[0]["lr"] == 0.02
    train(model, optimizer, rank, 3, 5)
    compare(values(model), expected, 0)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_objects_given_to_save(tmp_path, stage):
    run_ranks(stateful, 2, tmp_path / "saved", stage)


def asynchronously(rank, world, path, stage):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = by_dsx(stage)
    train(model, optimizer, rank, 0, 3)
    weights, states = get_state_dict(model, optimizer)
    expected = values(model)
    group = dist.new_group(backend="gloo")  # its thread's messages must not meet those of training
    pending = dcp.async_save({"model": weights, "optimizer": states}, checkpoint_id=path, process_group=group)
    train(model, optimizer, rank, 3, 5)  # while it is written
    later = values(model)
    pending.result()
    model, optimizer = by_dsx(stage, seed=1)
    load(model, optimizer, path)
    compare(values(model), expected, 0)
    train(model, optimizer, rank, 3, 5)
    compare(values(model), later, 0)
    if stage == 3:
        with pytest.raises(dsx_zero.ZeroStateError, match="get_model_state_dict"):
            dcp.async_save({"model": model.state_dict()}, checkpoint_id=path.with_name("other"), process_group=group)


@pytest.mark.parametrize("stage", [1, 3])
def test_asynchronous_saves(tmp_path, stage):
    run_ranks(asynchronously, 2, tmp_path / "saved", stage)


def options(rank, world, stage, low):
    from torch.distributed.checkpoint import state_dict as by_torch

    StateDictOptions, get_state_dict = by_torch.StateDictOptions, by_torch.get_state_dict
    dtype = torch.bfloat16 if low else torch.float32
    model, optimizer = by_dsx(stage, dtype=dtype)
    train(model, optimizer, rank, 0, 3)
    kinds = {
        "full": StateDictOptions(full_state_dict=True),
        "full on the host": StateDictOptions(full_state_dict=True, cpu_offload=True),
        "host": StateDictOptions(cpu_offload=True),
        "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    }
    saved = {name: copy.deepcopy(get_state_dict(model, optimizer, options=kind)) for name, kind in kinds.items()}
    if rank == 0:
        assert all(type(v) is torch.Tensor for v in saved["full"][0].values())
        assert all(type(v) is torch.Tensor for s in saved["full"][1]["state"].values() for v in s.values())
    else:
        assert saved["full on the host"] == ({}, {})
    train(model, optimizer, rank, 3, 4)
    expected = values(model)
    for name, (weights, states) in saved.items():
        kind = kinds[name]
        if name == "full on the host":
            kind = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        for first in (3, 2) if name == "full" else (3,):  # an optimizer without states, and one with other states
            model, optimizer = by_dsx(stage, seed=1, dtype=dtype)
            train(model, optimizer, rank, first, 3)
            found = copy.deepcopy((weights, states))
            by_torch.set_model_state_dict(model, found[0], options=kind)
            by_torch.set_optimizer_state_dict(model, optimizer, found[1], options=kind)
            train(model, optimizer, rank, 3, 4)
            compare(values(model), expected, 0)


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_options_of_torchs_functions(stage, low):
    run_ranks(options, 2, stage, low)


def nothing_is_stepped(rank, world, stage):
    """Asking for states of an optimizer that has made no step makes none."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = by_dsx(stage)
    before = values(model)
    states = get_optimizer_state_dict(model, optimizer)["state"]
    assert set(states) == {n for n, _ in model.named_parameters()}
    for found in states.values():
        assert set(found) == {"step", "exp_avg", "exp_avg_sq"}
        assert not found["exp_avg"].full_tensor().any()
    assert optimizer.steps_done == 0 and not optimizer.inner.state
    compare(values(model), before, 0)
    train(model, optimizer, rank, 0, 3)
    plain, reference = by_dsx(stage)
    train(plain, reference, rank, 0, 3)
    compare(values(model), values(plain), 0)


@pytest.mark.parametrize("stage", [1, 3])
def test_states_before_the_first_step(stage):
    run_ranks(nothing_is_stepped, 2, stage)


def wrong(rank, world):
    model, optimizer = by_dsx(2)
    train(model, optimizer, rank, 0, 1)
    good = optimizer.state_dict()
    plain = adamw(Net().parameters()).state_dict()
    cases = {
        "parameter groups": {**plain, "param_groups": [{**plain["param_groups"][0], "params": [0, 1]}]},
        "none of the state dict": {**plain, "state": {"nothing": {}}},
        r"first\.weight: exp_avg has the shape \(2, 2\)": {**plain, "state": {0: {"exp_avg": torch.ones(2, 2)}}},
        "also keeps|optimizer states": {**plain, "state": {0: {"exp_avg": torch.ones(5, 7)}}},
    }
    for match, state in cases.items():
        with pytest.raises((dsx_zero.ZeroStateError, dsx_zero.RanksDifferError), match=match):
            optimizer.load_state_dict(state if rank == 1 else plain)
    again = optimizer.state_dict()
    for name, part in good["slices"].items():
        assert torch.equal(part["param"], again["slices"][name]["param"])


def test_states_that_do_not_fit_change_nothing():
    run_ranks(wrong, 2)
