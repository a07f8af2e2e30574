"""Offload from the configuration: engines with state on the host or on disk train as those without, and read each
other's checkpoints.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def config(stage, where, folder, bf16):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if where != "device":
        section = {"device": where, **({"nvme_path": folder} if where == "nvme" else {})}
        zero |= {"offload_optimizer": section, "sub_group_size": 300}
        if stage == 3:
            zero["offload_param"] = dict(section)
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,  # one rank without offload sums the norm in another order
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
    }


def trained(engine, rank, steps, first=0):
    losses = []
    for step in range(first, first + 2 * steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = engine(torch.randn(2, 24, generator=generator).to(next(engine.module.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def work(rank, world, stage, where, folder, bf16):
    import dsx

    engine, *_ = dsx.initialize(model=Net(), config=config(stage, where, os.path.join(folder, "swap"), bf16))
    losses = trained(engine, rank, 2)
    engine.save_checkpoint(os.path.join(folder, where))
    losses += trained(engine, rank, 2, 4)
    tiers = {tier for tiers in engine.optimizer.state_bytes_by_tier().values() for tier in tiers}
    engine.destroy()
    del engine
    gc.collect()
    other, *_ = dsx.initialize(model=Net(), config=config(stage, "device", folder, bf16))
    other.load_checkpoint(os.path.join(folder, where))
    resumed = trained(other, rank, 2, 4)
    other.destroy()
    return losses, resumed, tiers


@pytest.mark.parametrize(
    ("stage", "where", "world", "bf16"),
    [(1, "cpu", 2, True), (2, "cpu", 1, False), (3, "cpu", 2, True), (3, "nvme", 2, True), (3, "nvme", 1, False)],
)
def test_losses_and_checkpoints_are_those_without_offload(stage, where, world, bf16, tmp_path):
    found = run_ranks(work, world, stage, where, str(tmp_path), bf16)
    wanted = run_ranks(work, world, stage, "device", str(tmp_path), bf16)
    for (losses, resumed, tiers), (plain, _, _) in zip(found, wanted, strict=True):
        assert losses == plain
        assert resumed == plain[4:]
        assert {"cpu": "host", "nvme": "disk"}[where] in tiers
    left = [name for _, _, names in os.walk(tmp_path / "swap") for name in names]
    assert not [name for name in left if name.endswith(".dat")]  # swap space goes with the engine


def test_two_folders_for_state_on_disk_are_refused(tmp_path):
    import dsx
    import dsx_zero

    settings = config(3, "nvme", str(tmp_path), False)
    settings["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path / "other")}
    with pytest.raises(
        dsx_zero.ZeroConfigError, match="expected one; give offload_param and offload_optimizer the same"
    ):
        dsx.initialize(model=Net(), config=settings)


def test_an_engine_lends_the_device_between_two_steps(tmp_path):
    import dsx

    found = []
    for lends in (False, True):
        engine, *_ = dsx.initialize(model=Net(), config=config(2, "device", str(tmp_path), True))
        losses = trained(engine, 0, 2)
        if lends:
            engine.offload_states({dsx.zero.OffloadStateTypeEnum.optim_states, "hp_params"}, device="cpu")
            with pytest.raises(RuntimeError, match="reload_states"):
                engine(torch.zeros(2, 24, dtype=torch.bfloat16))
            engine.reload_states()
        found.append(losses + trained(engine, 0, 2, 4))
        engine.destroy()
    assert found[0] == found[1]


def test_a_timeline_has_the_transfers_to_and_from_disk(tmp_path):
    import json

    import dsx

    settings = config(3, "nvme", str(tmp_path / "swap"), True)
    settings["zero_optimization"]["offload_param"] |= {"max_in_cpu": 0}
    settings["timeline"] = {"enabled": True, "start_step": 1, "steps": 1, "output_path": str(tmp_path / "run")}
    engine, *_ = dsx.initialize(model=Net(), config=settings)
    trained(engine, 0, 3)
    engine.destroy()
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    swaps = [event for event in spans if event["cat"] == "host-disk"]
    read = sum(event["args"]["bytes"] for event in swaps if event["name"].startswith("read shard."))
    written = sum(event["args"]["bytes"] for event in swaps if event["name"].startswith("write state."))
    numel = sum(p.numel() for p in Net().parameters())
    ahead = 2 * numel  # the next step's, which begin with this one's end
    assert 2 * 2 * 2 * numel <= read <= 2 * 2 * 2 * numel + ahead  # bf16, twice for each of two micro-batches
    assert written == 2 * 4 * numel  # both moments
    assert {"forward", "backward", "step"} <= {event["name"] for event in spans if event["cat"] == "compute"}
