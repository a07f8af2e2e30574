"""Pipelines beside the engine's other parts: 1-bit optimizers, offload, monitor, profiler, stage 3 kept whole."""

import csv
import json
import os

import dsx
import dsx_comm
import pytest
import torch
from dsx.profiling.flops_profiler import FlopsProfiler
from dsx_testkit import RankError, run_ranks
from torch import nn

dsx_pipe = pytest.importorskip("dsx_pipe")

WIDTH, MICRO_BATCHES = 8, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def layers():
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 1)]


def micro_batches(first, count):
    found = []
    for index in range(first, first + count):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index))
        found.append((x, x.sum(1, keepdim=True)))
    return found


def engine_of(schedule="1f1b", optimizer=("AdamW", {"lr": 1e-2, "weight_decay": 0.0}), **more):
    module = dsx_pipe.PipelineModule(
        layers(), num_stages=2, loss_fn=nn.functional.mse_loss, schedule=schedule, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "optimizer": {"type": optimizer[0], "params": optimizer[1]},
        **more,
    }
    return dsx.initialize(model=module, config=config)[0]


def train(engine, updates):
    data, losses = engine.module.grid.data, []
    for update in range(updates):
        batches = micro_batches(100 * update, MICRO_BATCHES * data.size)
        losses.append(float(engine.train_batch(iter(batches[data.rank :: data.size]))))
    return losses


def one_process(replicas, updates, build):
    model = nn.Sequential(*layers())
    optimizer, losses = build(model.parameters()), []
    for update in range(updates):
        total = 0.0
        for x, y in micro_batches(100 * update, MICRO_BATCHES * replicas):
            loss = nn.functional.mse_loss(model(x), y) / (MICRO_BATCHES * replicas)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


# - 1-bit optimizers


ONE_BIT = {
    "OneBitAdam": {"lr": 2e-3, "freeze_step": 6},
    "ZeroOneAdam": {"lr": 1e-3, "var_freeze_step": 8, "var_update_scaler": 2, "local_step_scaler": 2},
    "OneBitLamb": {"lr": 2e-3, "freeze_step": 6},
}


def _one_bit(rank, world, name, updates):
    engine = engine_of(optimizer=(name, ONE_BIT[name]))
    losses = train(engine, updates)
    values = torch.cat([p.detach().float().reshape(-1) for p in engine.module.parameters()])
    rows = [torch.empty_like(values) for _ in range(2)]
    dsx_comm.all_gather(rows, values, group=engine.module.grid.data.group)
    return losses, torch.equal(*rows)


def _one_bit_without_stages(rank, world, name, updates):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "optimizer": {"type": name, "params": ONE_BIT[name]},
    }
    engine, losses = dsx.initialize(model=nn.Sequential(*layers()), config=config)[0], []
    for update in range(updates):
        total = torch.zeros(())
        for x, y in micro_batches(100 * update, MICRO_BATCHES * world)[rank::world]:
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / MICRO_BATCHES
        dsx_comm.all_reduce(total, op=dsx_comm.ReduceOp.AVG)
        losses.append(float(total))
    return losses


@pytest.mark.parametrize("name", ONE_BIT)
def test_one_bit_optimizers_train_stages_with_replicas(name):
    """Exact while they do not compress; then each stage has a scale of its own."""
    expected = run_ranks(_one_bit_without_stages, 2, name, 9, timeout=120)[0]
    for losses, replicas_are_equal in run_ranks(_one_bit, 4, name, 9, timeout=120):
        assert replicas_are_equal or name == "ZeroOneAdam"  # which steps locally between two averages
        exact = 2 if name == "ZeroOneAdam" else 6
        assert losses[:exact] == pytest.approx(expected[:exact], rel=1e-4)
        assert losses == pytest.approx(expected, rel=0.1)


def _one_bit_shared(rank, world):
    weight = nn.Linear(WIDTH, WIDTH)
    tied = [dsx_pipe.TiedLayerSpec("w", lambda: weight), *layers()[:-1], dsx_pipe.TiedLayerSpec("w", lambda: weight)]
    module = dsx_pipe.PipelineModule(tied, num_stages=2, loss_fn=nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "OneBitAdam", "params": ONE_BIT["OneBitAdam"]},
    }
    dsx.initialize(model=module, config=config)


def test_weights_that_stages_share_are_refused_under_one_bit():
    """Each copy would have errors of its own carried on, and the copies would drift apart."""
    with pytest.raises(RankError, match="weights that pipeline stages share"):
        run_ranks(_one_bit_shared, 4, timeout=60)


def _one_bit_overflow(rank, world):
    engine = engine_of(
        optimizer=("OneBitAdam", ONE_BIT["OneBitAdam"]),
        fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
    )
    engine.set_batch_fn(lambda batch: tuple(t.half() for t in batch))
    leaf = next(iter(engine.optimizer.control.gradient_parameters()))
    handle = leaf.register_hook(lambda grad: grad * float("inf")) if rank == 3 else None
    train(engine, 1)
    skipped = engine.last_step.skipped
    if handle is not None:
        handle.remove()
    train(engine, 1)
    return skipped, engine.last_step.skipped, engine.loss_scale()


def test_an_overflow_on_one_replica_of_one_stage_skips_one_bit_steps_everywhere():
    assert run_ranks(_one_bit_overflow, 4, timeout=120) == [(True, False, 8.0)] * 4


# - offload


def _offload(rank, world, stage, where, folder, schedule):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if where is not None:
        section = {"device": where, **({"nvme_path": os.path.join(folder, "swap")} if where == "nvme" else {})}
        zero |= {"offload_optimizer": section, "sub_group_size": 100}
        if stage == 3:
            zero["offload_param"] = section
    engine = engine_of(schedule, zero_optimization=zero)
    losses = train(engine, 3)
    tiers = {tier for tiers in engine.optimizer.state_bytes_by_tier().values() for tier in tiers}
    engine.destroy()
    return losses, tiers


@pytest.mark.parametrize(
    ("world", "stage", "where", "schedule"),
    [(2, 1, "cpu", "zb-h1"), (4, 2, "cpu", "1f1b"), (2, 3, "cpu", "1f1b"), (4, 3, "nvme", "zb-h1")],
)
def test_state_of_stages_lies_on_the_host_or_on_disk(tmp_path, world, stage, where, schedule):
    found = run_ranks(_offload, world, stage, where, str(tmp_path), schedule, timeout=120)
    plain = run_ranks(_offload, world, stage, None, str(tmp_path), schedule, timeout=120)
    expected = one_process(world // 2, 3, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0))
    for (losses, tiers), (other, _) in zip(found, plain):
        assert losses == other and losses == pytest.approx(expected, rel=1e-4)
        assert {"cpu": "host", "nvme": "disk"}[where] in tiers


# - stage 3


def _stage3(rank, world, threshold):
    engine = engine_of("zb-h1", zero_optimization={"stage": 3, "stage3_param_persistence_threshold": threshold})
    with dsx_comm.count_traffic() as traffic:
        losses = train(engine, 3)
    gathers = sum(calls for name, (calls, _) in traffic.by_op().items() if "all_gather_into" in name)
    return losses, engine._pipe.splits_backward, gathers


def test_gathered_per_micro_batch_or_once_per_update_is_the_users_choice():
    """Parameters that stay gathered between updates let a zero-bubble schedule have its weight backward apart."""
    expected = one_process(2, 3, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0))
    often, once = (run_ranks(_stage3, 4, threshold, timeout=120) for threshold in (0, 10**6))
    for (losses, apart, many), (kept_losses, kept_apart, few) in zip(often, once):
        assert losses == pytest.approx(expected, rel=1e-4) and kept_losses == pytest.approx(expected, rel=1e-4)
        assert (apart, kept_apart) == (False, True)
        assert few < many


# - what is measured


def _watched(rank, world, folder, schedule):
    sections = {
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"},
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": os.path.join(folder, "flops.json")},
        "steps_per_print": 2,
    }
    engine = engine_of(schedule, **sections)
    train(engine, 4)
    engine.destroy()


@pytest.mark.parametrize(("world", "schedule"), [(2, "1f1b"), (4, "zbv")])
def test_stage_times_bubble_and_operations_of_all_stages(tmp_path, world, schedule):
    run_ranks(_watched, world, str(tmp_path), schedule, timeout=120)
    rows = {path.stem: list(csv.reader(path.open()))[1:] for path in tmp_path.rglob("*.csv")}
    stages = 4 if schedule == "zbv" else 2
    for name in ["bubble_share", "bubble_share_by_plan", "step_over_ideal", f"stage_{stages - 1}_backward_ms"]:
        values = [float(value) for _, value in rows[f"Train_Pipeline_{name}"]]
        assert len(values) == 2 and all(0 < value < 1e4 for value in values), name
    profile = json.loads((tmp_path / "flops.json").read_text())
    ranks = profile["facts"]["over_ranks"]["ranks"]
    model, replicas = nn.Sequential(*layers()), world // 2
    whole = FlopsProfiler(model)
    whole.start_profile()
    for x, y in micro_batches(100, MICRO_BATCHES * replicas):
        nn.functional.mse_loss(model(x), y).backward()
    whole.stop_profile()
    assert len(ranks) == world and all(rank["flops"] > 0 for rank in ranks)
    assert sum(rank["flops"] for rank in ranks) == whole.root.flops
    assert sum(rank["params"] for rank in ranks) == replicas * sum(p.numel() for p in model.parameters())


def _not_finite(rank, world, stage):
    engine = engine_of(zero_optimization={"stage": stage})
    if rank == 0:  # in the first stage's last block
        block = engine.module.get_submodule("2")
        block.register_forward_hook(lambda module, args, out: out * Spoiled.apply(out))
    with pytest.raises(dsx_pipe.StageError) as caught:
        train(engine, 1)
    return str(caught.value), caught.value.stage, caught.value.micro_batch


class Spoiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.ones_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_that_is_not_finite_stops_the_engine_before_the_update(stage):
    results = run_ranks(_not_finite, 2, stage, timeout=60)
    assert len(set(results)) == 1
    text, at, micro_batch = results[0]
    assert (at, micro_batch) == (0, 0) and "gradients stop being finite here" in text
    assert "layer 2 (Block)" in text
