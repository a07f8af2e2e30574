"""States that leave the device between two steps and come back: `offload_states` and `reload_states`."""

from __future__ import annotations

import itertools

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(12, 40)
        self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
        self.first.bias.requires_grad_(False)
        self.to(dtype)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def built(stage, dtype, **more):
    config = {"stage": stage, "stage3_param_persistence_threshold": 45, **more}
    return dsx_zero.shard(Net(dtype), lambda p: torch.optim.AdamW(p, lr=1e-2), config=config)


def backward(model, rank, step, dtype):
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
    model(x).backward()


def values(model, optimizer):
    with dsx_zero.GatheredParameters(model):
        found = [p.detach().clone() for p in model.parameters()]
    for part in optimizer.slices():
        found += [t.clone() for t in (part.master, *part.states.values()) if isinstance(t, torch.Tensor)]
    return found


def trained(rank, world, stage, dtype, include):
    model, optimizer = built(stage, dtype)
    for step in range(4):
        backward(model, rank, step, dtype)
        if step == 2 and include is not False:
            optimizer.offload_states(include)
            if include is None:
                optimizer.offload_states(include)  # again: nothing is left to move
            optimizer.reload_states(non_blocking=True)
            optimizer.reload_states()
        optimizer.step(max_norm=0.3)
        optimizer.zero_grad()
    return values(model, optimizer)


F32, BF16 = torch.float32, torch.bfloat16
SAMPLE = {(0, 1, F32), (1, 2, BF16), (2, 2, F32), (3, 2, BF16)}
CASES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow)
    for case in itertools.product((0, 1, 2, 3), (1, 2), (F32, BF16))
]


@pytest.mark.parametrize(("stage", "world", "dtype"), CASES)
def test_training_goes_on_with_the_same_bits(stage, world, dtype):
    wanted = run_ranks(trained, world, stage, dtype, False)
    for include in (None, {"optim_states", dsx_zero.OffloadStateTypeEnum.lp_grads}):
        for want, got in zip(wanted, run_ranks(trained, world, stage, dtype, include), strict=True):
            assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(want)


def moved(rank, world, stage, dtype):
    model, optimizer = built(stage, dtype)
    backward(model, rank, 0, dtype)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, rank, 1, dtype)
    before = optimizer.state_bytes_by_tier()
    optimizer.offload_states()
    return before, optimizer.state_bytes_by_tier()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_device_holds_nothing_but_single_values(stage):
    for before, after in run_ranks(moved, 2, stage, torch.bfloat16):
        for kind in ("params", "master", "grads", "optimizer"):
            assert after[kind]["host"] > 0
            assert after[kind].get("device", 0) <= 1000  # step counters, and the sums that tell edits
            assert sum(after[kind].values()) == sum(before[kind].values())


def refusing(rank, world, stage):
    model, optimizer = built(stage, torch.bfloat16)
    backward(model, rank, 0, torch.bfloat16)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.offload_states(["optim_states"])
    with torch.no_grad():
        model(torch.ones(1, 12).bfloat16())  # generation, while the parameters are there
    needs = [
        lambda: optimizer.step(),
        lambda: model(torch.ones(1, 12).bfloat16()),
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
        lambda: dsx_zero.full_state_dict(optimizer),
        lambda: dsx_zero.safe_get_full_fp32_param("first.weight", optimizer=optimizer),
    ]
    for need in needs:
        with pytest.raises(dsx_zero.ZeroStateError, match=r"optim_states .* call reload_states\(\) on every rank"):
            need()
    optimizer.offload_states(["lp_params"])
    with torch.no_grad(), pytest.raises(dsx_zero.ZeroStateError, match="lp_params"):
        model(torch.ones(1, 12).bfloat16())
    shown = [p.detach().float() for p in model.parameters() if not isinstance(p, dsx_zero.PartitionedParameter)]
    assert all(p.isnan().all() for p in shown if p.numel())
    optimizer.reload_states()
    backward(model, rank, 1, torch.bfloat16)
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_needs_the_values_says_so(stage):
    run_ranks(refusing, 2, stage)


def late_backward(rank, world, stage):
    model, optimizer = built(stage, torch.bfloat16)
    backward(model, rank, 0, torch.bfloat16)
    loss = model(torch.ones(2, 12).bfloat16())
    optimizer.offload_states(["lp_grads", "optim_states"])
    with pytest.raises(RuntimeError, match=r"reload_states|more than one element"):
        loss.backward()
    optimizer.reload_states()
    backward(model, rank, 1, torch.bfloat16)
    optimizer.step()


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 2)])
def test_a_graph_of_before_is_refused(stage, world):
    run_ranks(late_backward, world, stage)


def test_wrong_arguments_change_nothing():
    model, optimizer = built(1, torch.float32)
    with pytest.raises(dsx_zero.ZeroConfigError, match="got 'masters', expected a set of optim_states, hp_params"):
        optimizer.offload_states({"masters"})
    with pytest.raises(dsx_zero.ZeroConfigError, match="expected 'cpu'; state that is to live on disk needs"):
        optimizer.offload_states(device=dsx_zero.OffloadDeviceEnum.nvme)
    backward(model, 0, 0, torch.float32)
    optimizer.step()


def shared(rank, world):
    return trained(rank, world, 2, torch.bfloat16, None), trained(rank, world, 2, torch.bfloat16, False)


def test_memory_that_the_ranks_share_stays():
    for got, want in run_ranks(shared, 2, backend="dsx"):
        assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(want)


def elsewhere(rank, world):
    config = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    model, optimizer = built(3, torch.bfloat16, **config)
    backward(model, rank, 0, torch.bfloat16)
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.state_bytes_by_tier()
    optimizer.offload_states()
    assert optimizer.state_bytes_by_tier()["optimizer"]["host"] == before["optimizer"]["host"]
    optimizer.reload_states()
    backward(model, rank, 1, torch.bfloat16)
    optimizer.step()


def test_what_lives_on_the_host_stays_there():
    run_ranks(elsewhere, 2)


def used_while_away(rank, world, stage):
    """What needs the states is refused, and afterwards the model trains as if nothing had been asked."""
    model, optimizer = built(stage, torch.bfloat16)
    parameters = list(model.parameters())
    for step in range(5):
        backward(model, rank, step, torch.bfloat16)
        optimizer.step(max_norm=0.3)
        optimizer.zero_grad()
        if step in (1, 3):
            optimizer.offload_states()
            optimizer.free_gathered()  # needs none of the states
            refused = [p for p in parameters if isinstance(p, dsx_zero.PartitionedParameter)]
            for asked in ([p for p in refused[:1]], refused):
                if asked:
                    with pytest.raises(dsx_zero.ZeroStateError, match="reload_states"):
                        dsx_zero.GatheredParameters(asked).__enter__()
            for parameter in refused:
                with pytest.raises(dsx_zero.ZeroStateError, match="reload_states"):
                    parameter.full_tensor()
            if step == 3:
                with torch.no_grad(), pytest.raises(dsx_zero.ZeroStateError, match="reload_states"):
                    model(torch.zeros(2, 12, dtype=torch.bfloat16))
            optimizer.reload_states()
    return values(model, optimizer)


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (2, 2), (3, 1), (3, 2)])
def test_what_is_refused_while_states_are_away_leaves_the_model_usable(stage, world):
    def plain(rank, world, stage):
        model, optimizer = built(stage, torch.bfloat16)
        for step in range(5):
            backward(model, rank, step, torch.bfloat16)
            optimizer.step(max_norm=0.3)
            optimizer.zero_grad()
        return values(model, optimizer)

    for expected, found in zip(run_ranks(plain, world, stage), run_ranks(used_while_away, world, stage)):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
