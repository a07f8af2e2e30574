"""The host's step of an engine: during backward with the bits of one after it, and one step late where that is asked
for, with checkpoints that go on alike.
"""

from __future__ import annotations

import os

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

WIDTH = 24


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def built(stage, clipping=0.0, schedule=True, **section):
    import dsx

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": WIDTH * WIDTH + WIDTH,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu", **section},
        },
    }
    if schedule:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}}
    return dsx.initialize(model=Net(), config=config)[0]


def batch(step, rank):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(engine, rank, steps, first=0, between=lambda engine: None):
    losses = []
    for step in range(2 * first, 2 * (first + steps)):
        loss = engine(batch(step, rank))
        engine.backward(loss)
        between(engine)
        engine.step()
        losses.append(loss.item())
    return losses


def early(rank, world, stage, place):
    said, found = [], []
    announce = dsx_zero.ZeroOptimizer.step_during_backward

    def noting(self, grad_scale=1.0, max_norm=None):
        said.append(announce(self, grad_scale, max_norm))
        return said[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsx_zero.ZeroOptimizer, "step_during_backward", noting)
        for on in (True, False):
            engine = built(stage, step_during_backward=on, **place)
            losses = trained(engine, rank, 5)
            with dsx_zero.GatheredParameters(engine.module):
                found.append((losses, [p.detach().clone() for p in engine.module.parameters()]))
            engine.destroy()
        assert said[:5] == [False, False, True, True, True]  # once per update, and two trials
        assert not any(said[5:])
        said.clear()
        for clipping, expected in ((1e-3, [False] * 4), (1e3, [False, True, True, True])):
            losses = []
            for on in (True, False):
                engine = built(stage, clipping=clipping, step_during_backward=on, **place)
                losses.append(trained(engine, rank, 4))
                engine.destroy()
            assert said == [*expected, *[False] * 4]
            assert losses[0] == losses[1]
            said.clear()
    (losses, values), (same_losses, same) = found
    assert losses == same_losses
    assert all(torch.equal(a, b) for a, b in zip(values, same, strict=True))


@pytest.mark.parametrize(("stage", "world", "device"), [(1, 2, "cpu"), (2, 1, "cpu"), (3, 2, "cpu"), (2, 2, "nvme")])
def test_units_are_stepped_during_backward_with_the_bits_of_a_step_after_it(stage, world, device, tmp_path):
    run_ranks(early, world, stage, {"device": device, "nvme_path": str(tmp_path)})


def several_losses(rank, world):
    """Two backwards per update, each said to be the last: the loop keeps its meaning."""
    found = []
    for on in (True, False):
        engine = built(2, step_during_backward=on)
        for step in range(8):
            x = batch(step, rank)
            engine.backward(engine(x))
            engine.backward(engine(2 * x))
            engine.step()
        with dsx_zero.GatheredParameters(engine.module):
            found.append([p.detach().clone() for p in engine.module.parameters()])
        engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_several_backwards_per_update():
    run_ranks(several_losses, 2)


def late(rank, world, stage, folder):
    engine = built(stage, clipping=0.1, late_update_after=2)
    losses = trained(engine, rank, 4)
    engine.save_checkpoint(os.path.join(folder, "late"))
    weights = engine.module_state_dict()
    went_on = trained(engine, rank, 3, 4)
    engine.destroy()
    other = built(stage, clipping=0.1, late_update_after=2)
    other.load_checkpoint(os.path.join(folder, "late"))
    loaded = other.module_state_dict()
    resumed = trained(other, rank, 3, 4)
    other.destroy()
    plain = built(stage, clipping=0.1)
    usual = trained(plain, rank, 7)
    plain.destroy()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    assert went_on == resumed
    assert losses[:6] == usual[:6]  # two updates of the usual kind, and the third forward
    assert losses[6:] != usual[6:8]


@pytest.mark.parametrize(("stage", "world"), [(2, 2), (3, 1)])
def test_a_run_with_late_updates_resumes_as_it_went_on(stage, world, tmp_path):
    run_ranks(late, world, stage, str(tmp_path))


def traced(optimizer, folder):
    """Spans of one step by lane, of an engine with its optimizer on the host."""
    import json

    import dsx

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": optimizer,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 600, "offload_optimizer": {"device": "cpu"}},
        "timeline": {"enabled": True, "start_step": 3, "steps": 1, "output_path": str(folder)},
    }
    engine, *_ = dsx.initialize(model=Net(), config=config)
    for step in range(5):
        engine.backward(engine(batch(step, 0)))
        engine.step()
    engine.destroy()
    events = [e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    lanes = {e["cat"] for e in events}
    return {lane: [e for e in events if e["cat"] == lane] for lane in lanes}


def test_a_timeline_has_the_host_s_step_and_copies_to_the_device(tmp_path):
    numel = sum(p.numel() for p in Net().parameters())
    by_lane = traced({"type": "AdamW", "params": {"lr": 1e-2}}, tmp_path / "dsx")
    assert sum(e["args"]["elements"] for e in by_lane["host step"]) == numel
    backward, step = (next(e for e in by_lane["compute"] if e["name"] == name) for name in ("backward", "step"))
    begin, end = min(e["ts"] for e in by_lane["host step"]), max(e["ts"] + e["dur"] for e in by_lane["host step"])
    assert backward["ts"] < begin < end < step["ts"] + step["dur"]
    assert sum(e["args"]["bytes"] for e in by_lane["device-host"]) == 4 * numel  # masters of fp32 to parameters
    by_lane = traced({"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, tmp_path / "torch")
    assert "host step" not in by_lane
    assert sum(e["args"]["bytes"] for e in by_lane["device-host"]) == 4 * numel
