"""Copies of a sharded model (EMA, reference, teacher): values of each rank, updated without a message."""

from __future__ import annotations

import copy

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DECAY = 0.9


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.frozen = nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(7, 7)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(self.frozen(x))))) * self.scale


def batch(number, dtype=torch.float32):
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(number)).to(dtype)


def step(model, optimizer, number):
    """The same batch on every rank, so that gradients are those of one process bit for bit on two ranks."""
    model(batch(number, model.first.weight.dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


def plain_run():
    """Losses and averages of torch's own EMA on one process."""
    model = Net()
    optimizer = sgd(model.parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)  # the first call copies
    for number in range(4):
        step(model, optimizer, number)
        average.update_parameters(model)
    average.module.eval()
    return {n: p.detach().clone() for n, p in average.module.named_parameters()}, average.module(batch(9)).detach()


def whole(state):
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items() if n != "updates"}


def ema(rank, world, stage, offload, path):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    expected, output = plain_run()
    config = {"stage3_param_persistence_threshold": 4}
    if offload:
        config["offload_optimizer"] = {"device": "cpu"}
    model, optimizer = dsx_zero.shard(Net(), lambda p: sgd(p), stage=stage, config=config)
    average = optimizer.copy_of(device="cpu" if offload else None)
    for number in range(4):
        step(model, optimizer, number)
        sent = []
        names = [n for n in ("all_reduce", "all_gather_into_tensor", "broadcast", "all_gather", "isend", "irecv")]
        before = {name: getattr(dist, name) for name in names}
        for name in names:
            setattr(dist, name, lambda *a, _name=name, **k: sent.append(_name))
        average.update(DECAY)
        for name, function in before.items():
            setattr(dist, name, function)
        assert not sent
    assert average.updates == 4
    state = whole(average.state_dict())
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    trained = {n: v.clone() for n, v in whole(optimizer.copy_of().state_dict()).items()}
    model.eval()
    with torch.no_grad():
        mine = model(batch(9))
        with average.applied():
            torch.testing.assert_close(model(batch(9)), output, rtol=1e-6, atol=1e-6)
            for forbidden in (optimizer.step, optimizer.state_dict, lambda: average.update(0.5)):
                with pytest.raises(dsx_zero.ZeroStateError, match="leave the context"):
                    forbidden()
        assert torch.equal(model(batch(9)), mine)
    for name, value in whole(optimizer.copy_of().state_dict()).items():
        assert torch.equal(value, trained[name]), name
    for name, value in whole(average.state_dict()).items():
        assert torch.equal(value, state[name]), name

    dcp.save({"ema": average}, checkpoint_id=path)
    again = optimizer.copy_of()
    dcp.load({"ema": again}, checkpoint_id=path)
    assert again.updates == 4
    for name, value in whole(again.state_dict()).items():
        assert torch.equal(value, state[name]), name
    again.update()
    again.load_state_dict({**state, "updates": 7})
    assert again.updates == 7
    for name, value in whole(again.state_dict()).items():
        assert torch.equal(value, state[name]), name
    model.train()
    step(model, optimizer, 4)
    average.update(DECAY)


@pytest.mark.parametrize(
    ("stage", "offload", "world"),
    [(0, False, 2), (1, True, 2), (2, False, 2), (3, False, 2), (3, True, 2), (3, False, 1)],
)
def test_an_ema_is_that_of_one_process_bit_for_bit(tmp_path, stage, offload, world):
    run_ranks(ema, world, stage, offload, tmp_path / "saved")


def reference(rank, world, stage):
    """A reference in 16 bits: what the model was, while the model goes on; masters keep their low bits."""
    model, optimizer = dsx_zero.shard(
        Net().to(torch.bfloat16), lambda p: sgd(p), stage=stage, config={"stage3_param_persistence_threshold": 0}
    )
    step(model, optimizer, 0)
    model.eval()
    kept = optimizer.copy_of(device="cpu")
    with torch.no_grad():
        first = model(batch(9, torch.bfloat16))
    model.train()
    step(model, optimizer, 1)
    masters = dsx_zero.full_state_dict(optimizer, rank0_only=False)["masters"]
    model.eval()
    with torch.no_grad():
        changed = model(batch(9, torch.bfloat16))
        with kept.applied():
            assert torch.equal(model(batch(9, torch.bfloat16)), first)
        assert torch.equal(model(batch(9, torch.bfloat16)), changed) and not torch.equal(changed, first)
    for name, value in dsx_zero.full_state_dict(optimizer, rank0_only=False)["masters"].items():
        assert torch.equal(value, masters[name]), name
    if stage > 0:
        whole_bytes = sum(p.numel() * (4 if p.requires_grad else 2) for p in model.parameters())
        assert kept.nbytes < whole_bytes
    part = optimizer.copy_of(model.first)
    assert set(part.state_dict()) == {"first.weight", "first.bias", "updates"}
    named = optimizer.copy_of(["last.bias", "first.weight"])
    assert set(named.state_dict()) == {"first.weight", "last.bias", "updates"}
    for wrong, match in (("first.weight", "expected names"), (["nothing"], "nothing"), (nn.Linear(1, 1), "no part")):
        with pytest.raises((dsx_zero.ZeroStateError, dsx_zero.RanksDifferError), match=match):
            optimizer.copy_of(wrong)
    for wrong in (1.5, "0.9", -0.1):
        with pytest.raises(dsx_zero.ZeroStateError, match="from 0 to 1"):
            kept.update(wrong)
    with pytest.raises(dsx_zero.ZeroStateError, match="unexpected"):
        part.load_state_dict({**part.state_dict(), "more": torch.ones(1)})
    with pytest.raises((dsx_zero.ZeroStateError, dsx_zero.RanksDifferError)):
        optimizer.copy_of(None if rank == 0 else model.first)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_reference_of_a_16_bit_model(stage):
    run_ranks(reference, 2, stage)


def by_torch(rank, world):
    model, _ = dsx_zero.shard(nn.Linear(8, 8), sgd, stage=3, config={"stage3_param_persistence_threshold": 0})
    for make in (copy.deepcopy, AveragedModel):
        with pytest.raises(dsx_zero.PartitionedParameterError, match=r"optimizer\.copy_of\(\)"):
            make(model)


def test_torchs_copies_name_it():
    run_ranks(by_torch, 2)
