"""Experts under an engine: configuration, training like plain PyTorch, events, and checkpoints of any number of
ranks.
"""

import csv
import logging

import dsx
import dsx_comm
import pytest
import torch
from dsx_moe import MoE, PackedExperts, apply_expert_parallel
from dsx_moe.huggingface import PackedExpertShard
from dsx_testkit import run_ranks
from torch import nn

HIDDEN = 8


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, ep_size=1, packed=False, **options):
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        expert = PackedExperts(4, HIDDEN, 12) if packed else lambda i: FeedForward()
        defaults = {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}
        self.moe = MoE(HIDDEN, expert, 4, ep_size, **{**defaults, **options})

    def forward(self, x):
        out, l_aux, _ = self.moe(self.first(x))
        return out.square().mean() + 0.1 * l_aux


def config(stage=0, **more):
    return {
        "train_micro_batch_size_per_gpu": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.3,
        "steps_per_print": None,
        **more,
    }


def built(seed=3, **options):
    torch.manual_seed(seed)
    return Model(**options)


def batch(rank, step):
    return torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(100 * step + rank))


def plain(world, steps, **options):
    model = built(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        each = [model(batch(rank, step)) for rank in range(world)]
        (sum(each) / world).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        losses.append([loss.item() for loss in each])
    return losses


def run_steps(engine, rank, steps):
    losses = []
    for step in steps:
        loss = engine(batch(rank, step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _train(rank, world, stage, ep_size, packed):
    dsx_comm.init_distributed()
    engine, *_ = dsx.initialize(
        model=built(ep_size=ep_size, packed=packed), config=config(stage, optimizer=ADAMW), dist_init_required=False
    )
    return run_steps(engine, rank, range(4))


ADAMW = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01, "torch_adam": True}}


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_trains_like_plain_pytorch(stage):
    assert run_ranks(_train, 1, stage, 1, False)[0] == pytest.approx([x[0] for x in plain(1, 4)], rel=1e-4)


@pytest.mark.parametrize(("stage", "packed"), [(1, True), (3, False)])
def test_experts_on_two_ranks_train_like_one_process(stage, packed):
    expected = plain(2, 4, packed=packed)
    for rank, losses in enumerate(run_ranks(_train, 2, stage, 2, packed)):
        assert losses == pytest.approx([step[rank] for step in expected], rel=1e-4)


def _offloaded(rank, world, folder, stage, where, packed):
    dsx_comm.init_distributed()
    section = {"device": where, **({"nvme_path": f"{folder}/swap"} if where == "nvme" else {})}
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": section,
        "sub_group_size": 200,
    }
    if stage == 3:
        zero["offload_param"] = section
    engine, *_ = dsx.initialize(
        model=built(ep_size=2, packed=packed),
        config=config(stage, optimizer=ADAMW, zero_optimization=zero),
        dist_init_required=False,
    )
    losses = run_steps(engine, rank, range(2))
    engine.save_checkpoint(folder)
    losses += run_steps(engine, rank, range(2, 4))
    tiers = {tier for tiers in engine.optimizer.state_bytes_by_tier().values() for tier in tiers}
    engine.destroy()
    return losses, tiers


@pytest.mark.parametrize(("stage", "where", "packed"), [(1, "cpu", True), (3, "cpu", False), (3, "nvme", True)])
def test_state_of_experts_lies_on_the_host_or_on_disk(tmp_path, stage, where, packed):
    expected = plain(2, 4, packed=packed)
    found = run_ranks(_offloaded, 2, str(tmp_path), stage, where, packed)
    for rank, (losses, tiers) in enumerate(found):
        assert losses == pytest.approx([step[rank] for step in expected], rel=1e-4)
        assert {"cpu": "host", "nvme": "disk"}[where] in tiers
    resumed = run_ranks(_resume, 2, str(tmp_path), 2, 1, packed)  # without offload, with other ranks
    for (losses, _), other in zip(found, resumed):
        assert other == pytest.approx(losses[2:], rel=1e-4)


def _save(rank, world, folder, stage, ep_size, packed):
    dsx_comm.init_distributed()
    engine, *_ = dsx.initialize(
        model=built(ep_size=ep_size, packed=packed), config=config(stage, optimizer=ADAMW), dist_init_required=False
    )
    run_steps(engine, rank, range(2))
    engine.save_checkpoint(folder)
    return run_steps(engine, rank, range(2, 4))


def _resume(rank, world, folder, stage, ep_size, packed):
    dsx_comm.init_distributed()
    model = built(seed=11, ep_size=ep_size, packed=packed)
    engine, *_ = dsx.initialize(model=model, config=config(stage, optimizer=ADAMW), dist_init_required=False)
    engine.load_checkpoint(folder)
    return run_steps(engine, rank, range(2, 4))


@pytest.mark.parametrize("packed", [True, False])
def test_a_checkpoint_loads_under_another_expert_parallel_size(tmp_path, packed):
    expected = run_ranks(_save, 2, str(tmp_path), 2, 2, packed)
    for stage, ep_size in ((3, 2), (1, 1)):
        for mine, other in zip(run_ranks(_resume, 2, str(tmp_path), stage, ep_size, packed), expected):
            assert mine == pytest.approx(other, rel=1e-4)


def test_a_checkpoint_of_one_expert_parallel_rank_loads_under_two(tmp_path):
    expected = run_ranks(_save, 2, str(tmp_path), 0, 1, False)
    for mine, other in zip(run_ranks(_resume, 2, str(tmp_path), 2, 2, False), expected):
        assert mine == pytest.approx(other, rel=1e-4)


class Packed(nn.Module):
    """The form of Hugging Face's experts."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.hidden_dim, self.act_fn = 4, HIDDEN, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 24, HIDDEN) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(4, HIDDEN, 12) * 0.3)

    def forward(self, tokens, chosen, weights):
        gate, up = torch.einsum("tkij,tj->tki", self.gate_up_proj[chosen], tokens).chunk(2, -1)
        return torch.einsum("tkij,tkj,tk->ti", self.down_proj[chosen], self.act_fn(gate) * up, weights)


class Converted(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, 4), Packed()

    def forward(self, x):
        weights, chosen = torch.softmax(self.gate(x), -1).topk(2)
        return self.experts(x, chosen, weights).square().mean()


def _section(rank, world, section):
    torch.manual_seed(3)
    model = Converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # built before the experts are replaced
    engine, *_ = dsx.initialize(
        model=model, optimizer=optimizer, config=config(1, optimizer=None, expert_parallel=section)
    )
    return type(model.experts).__name__, run_steps(engine, rank, range(3))


def test_the_section_replaces_experts_and_keeps_the_optimizer():
    on = run_ranks(_section, 1, {"enabled": True})[0]
    off = run_ranks(_section, 1, {"enabled": False})[0]
    assert (on[0], off[0]) == (PackedExpertShard.__name__, "Packed")
    assert on[1] == pytest.approx(off[1], rel=1e-4)


def test_the_section_spreads_experts_over_ranks():
    spread = run_ranks(_section, 2, {"enabled": True, "autoep_size": 2})
    alone = run_ranks(_section, 2, {"enabled": False})
    for (kind, mine), (_, other) in zip(spread, alone):
        assert kind == "PackedExpertShard"
        assert mine == pytest.approx(other, rel=1e-4)


def _sliced(rank, world, stage, slices, folder):
    dsx_comm.init_distributed()
    topology = dsx_comm.topology.PipeModelDataParallelTopology(num_pp=1, num_mp=slices, num_dp=world // slices)
    torch.manual_seed(3)
    engine, *_ = dsx.initialize(
        model=Converted(),
        mpu=dsx.pipe.RankGrid(topology),
        config=config(stage, optimizer=ADAMW, expert_parallel={"enabled": True, "expert_tensor_parallel_size": slices}),
    )
    found = []
    for step in range(4):
        loss = engine(batch(rank // slices, step))
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.last_step.grad_norm))
        if step == 1 and folder:
            engine.save_checkpoint(folder)
    if folder:
        engine.load_checkpoint(folder)
        assert engine.global_steps == 2
        loss = engine(batch(rank // slices, 2))
        assert loss.item() == pytest.approx(found[2][0], rel=1e-5)
    return found


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 3), (4, 2)])
def test_the_section_slices_experts_and_the_norm_counts_each_slice(tmp_path, world, stage):
    expected = run_ranks(_sliced, world // 2, 0, 1, None)
    for rank, found in enumerate(run_ranks(_sliced, world, stage, 2, str(tmp_path))):
        assert found == [pytest.approx(pair, rel=1e-4) for pair in expected[rank // 2]]


def test_keys_of_other_kernels_are_accepted_with_a_warning_and_unknown_ones_refused(caplog):
    with caplog.at_level(logging.WARNING):
        found = dsx.config.load_config(
            config(expert_parallel={"enabled": True, "comm_backend": "deepep"}), world_size=1
        )
    assert any("comm_backend" in warning for warning in found.warnings)
    with pytest.raises(dsx.DsxConfigError, match="autoep_size"):
        dsx.config.load_config(config(expert_parallel={"autoep_sise": 2}), world_size=1)


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="no module of the model"):
        dsx.initialize(model=nn.Linear(2, 2), config=config(expert_parallel={"enabled": True}))


def test_events_of_experts_reach_the_writers_and_the_bias_moves(tmp_path):
    model = built(bias_update_rate=0.1)
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    engine, *_ = dsx.initialize(model=model, config=config(csv_monitor=monitor))
    run_steps(engine, 0, range(3))
    engine.destroy()
    assert bool(model.moe.gate.expert_bias.any())
    rows = {path.stem: list(csv.reader(path.open())) for path in tmp_path.rglob("*.csv")}
    load = next(rows[name] for name in rows if name.endswith("moe_max_load"))
    assert len(load) == 4
    assert sum("load_" in name for name in rows) >= 4


def test_what_was_converted_by_hand_stays_as_it_is():
    torch.manual_seed(0)
    model = Converted()
    apply_expert_parallel(model, 1)
    engine, *_ = dsx.initialize(model=model, config=config(optimizer=ADAMW))
    assert run_steps(engine, 0, range(2))


def _train_offloaded(rank, world, stage, device, folder):
    dsx_comm.init_distributed()
    place = {"device": device, "nvme_path": folder}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if device != "none":
        zero |= {"offload_optimizer": place, **({"offload_param": place | {"max_in_cpu": 0}} if stage == 3 else {})}
    settings = config(stage, optimizer=ADAMW, zero_optimization=zero, gradient_clipping=0.0)
    engine, *_ = dsx.initialize(model=built(ep_size=2), config=settings, dist_init_required=False)
    losses = run_steps(engine, rank, range(3))
    tiers = engine.optimizer.state_bytes_by_tier()["optimizer"]
    engine.destroy()
    return losses, tiers


@pytest.mark.parametrize(("stage", "device"), [(2, "cpu"), (3, "cpu"), (3, "nvme")])
def test_experts_with_state_elsewhere_train_as_without(stage, device, tmp_path):
    wanted = run_ranks(_train_offloaded, 2, stage, "none", "", backend=None)
    found = run_ranks(_train_offloaded, 2, stage, device, str(tmp_path), backend=None)
    for (losses, tiers), (plain_losses, _) in zip(found, wanted, strict=True):
        assert losses == plain_losses
        assert {"cpu": "host", "nvme": "disk"}[device] in tiers
