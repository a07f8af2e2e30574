"""Offloaded optimizers of every kind train as on the device; `ratio` leaves units there; old names are read."""

from __future__ import annotations

import logging

import dsx_zero
import pytest
import torch
from dsx_testkit import MemoryStore, run_ranks
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


class Plain(torch.optim.Optimizer):
    """An optimizer of a user's own, which says nothing about parts."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("kept", torch.zeros_like(p))
                    kept.mul_(0.9).add_(p.grad)
                    p.sub_(kept.sign(), alpha=group["lr"])


def kinds():
    import dsx_ops

    return {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
        "lion": lambda p: dsx_ops.FusedLion(p, lr=1e-2),
        "cpu adam": lambda p: dsx_ops.CPUAdam(p, lr=1e-2),
        "adam8bit": lambda p: dsx_ops.Adam8bit(p, lr=1e-2),
        "lamb": lambda p: dsx_ops.FusedLamb(p, lr=1e-2),
        "own": Plain,
    }


def trained(rank, world, kind, stage, device, more):
    config = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if device != "none":
        config["offload_optimizer"] = {"device": device, **more}
        if stage == 3 and not more:
            config["offload_param"] = {"device": device, **({"max_in_cpu": 0} if device == "nvme" else {})}
    model, optimizer = dsx_zero.shard(Net().bfloat16(), kinds()[kind], config=config, store=MemoryStore())
    for step in range(3):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
        model(x).backward()
        optimizer.step(max_norm=0.5)
        optimizer.zero_grad()
    with dsx_zero.GatheredParameters(model):
        return [p.detach().clone() for p in model.parameters()], optimizer.state_bytes_by_tier()


KINDS = ["sgd", "plain sgd", "adagrad", "lion", "cpu adam", "adam8bit", "lamb", "own"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_optimizer_has_the_bits_of_the_device(kind):
    pytest.importorskip("dsx_ops")
    for stage, device in ((2, "cpu"), (3, "nvme")):
        wanted, _ = run_ranks(trained, 2, kind, stage, "none", {})[0]
        for got, _ in run_ranks(trained, 2, kind, stage, device, {}):
            assert [torch.equal(a, b) for a, b in zip(got, wanted, strict=True)] == [True] * len(wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_any_optimizer_has_the_bits_of_stage_0_on_one_rank(kind):
    pytest.importorskip("dsx_ops")
    wanted, _ = trained(0, 1, kind, 0, "none", {})
    for stage, device in ((1, "nvme"), (2, "cpu"), (3, "none"), (3, "cpu"), (3, "nvme")):
        got, _ = trained(0, 1, kind, stage, device, {})
        assert [torch.equal(a, b) for a, b in zip(got, wanted, strict=True)] == [True] * len(wanted), (stage, device)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_ratio_leaves_whole_units_on_the_device(stage, device):
    tier = {"cpu": "host", "nvme": "disk"}[device]
    wanted, whole = run_ranks(trained, 2, "sgd", stage, device, {"ratio": 1.0})[0]
    for ratio in (0.75, 0.5, 0.0):
        got, nbytes = run_ranks(trained, 2, "sgd", stage, device, {"ratio": ratio})[0]
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        for kind in ("master", "optimizer"):
            assert abs(nbytes[kind].get(tier, 0) / whole[kind][tier] - ratio) < 0.13  # units are whole


def test_the_placement_of_each_unit_is_printed(caplog):
    config = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}, "reduce_bucket_size": 1000}
    with caplog.at_level(logging.INFO, logger="dsx_zero"):
        _, optimizer = dsx_zero.shard(Net(), torch.optim.AdamW, config=config)
    for record in optimizer.placements:
        assert str(record) in caplog.text
    tiers = [record.placement.masters.name for record in optimizer.placements]
    assert tiers == sorted(tiers)
    assert set(tiers) == {"device", "host"}
    assert "optimizer states: host" in str(optimizer.placements[-1])
    with pytest.raises(AttributeError):
        optimizer.placements[0].unit = 3


def test_old_names_are_read_with_a_warning(caplog):
    old = {"stage": 3, "cpu_offload": True, "cpu_offload_params": True, "cpu_offload_use_pin_memory": True}
    with caplog.at_level(logging.WARNING, logger="dsx_zero"):
        _, optimizer = dsx_zero.shard(Net(), torch.optim.AdamW, stage=3, config=old)
    assert "zero_optimization.cpu_offload: it is an old name, read as offload_optimizer with device cpu" in caplog.text
    assert optimizer.state_bytes_by_tier()["optimizer"].keys() <= {"host"}
    assert optimizer.placements[0].placement.parameters.name == "host"
    assert optimizer.placements[0].placement.masters.pin
    both = {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "nvme"}}
    with pytest.raises(dsx_zero.ZeroConfigError, match="cpu_offload is the old name of offload_optimizer"):
        dsx_zero.shard(Net(), torch.optim.AdamW, config=both)


@pytest.mark.parametrize(
    "section", [{"super_offload": True}, {"cpuadam_cores_perc": 0.5}], ids=["super_offload", "cpuadam_cores_perc"]
)
def test_what_is_refused_says_why(section):
    config = {"stage": 2, "offload_optimizer": {"device": "cpu", **section}}
    with pytest.raises(dsx_zero.ZeroConfigError, match="because the host step is not bound to its own cores"):
        dsx_zero.shard(Net(), torch.optim.AdamW, config=config)
    with pytest.raises(dsx_zero.ZeroConfigError, match="because it changes what is trained"):
        dsx_zero.shard(Net(), torch.optim.AdamW, config={"stage": 2, "zenflow": {"topk_ratio": 0.1}})
