"""A plan says exactly what real ranks hold and send: bytes of model state by class and tier, and every message."""

import contextlib

import pytest
import torch
from dsx_testkit import run_ranks
from dsx_testkit.operations import Operations
from torch import nn

WIDTH = 193


class Stack(nn.Module):
    """Blocks of odd sizes, with a tied and a frozen weight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks[2][2].bias = self.head.bias

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) * self.scale.to(x.dtype)
        return self.head(x).float().square().mean()


def settings(stage, accumulation=1, *, low=False, **zero):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, **zero},
        **({"bf16": {"enabled": True}} if low else {}),
    }


HOST = {"device": "cpu"}
CASES = {
    "stage 0": settings(0),
    "stage 0, 4 micro-batches": settings(0, 4),
    "stage 1": settings(1, low=True),
    "stage 1, 5 micro-batches": settings(1, 5),
    "stage 2": settings(2),
    "stage 2, 4 micro-batches": settings(2, 4, low=True),
    "stage 2, full gradients kept": settings(2, 4, keep_full_gradients=True),
    "stage 3": settings(3),
    "stage 3, 5 micro-batches": settings(3, 5, low=True),
    "stage 2, optimizer on the host": settings(2, offload_optimizer=HOST),
    "stage 3, all on the host": settings(3, 2, low=True, offload_optimizer=HOST, offload_param=HOST),
    "stage 3, in pieces": settings(3, reduce_bucket_size=40_000),
}


def train(rank, world, make, case):
    """What a real rank holds before its fourth step, and sends and computes in it."""
    import dsx
    import dsx_comm

    config = dict(case, zero_optimization=dict(case["zero_optimization"]))
    torch.manual_seed(0)
    engine, *_ = dsx.initialize(model=make(), config=config)
    accumulation = config["gradient_accumulation_steps"]
    held, sent, dtype = {}, {}, next(engine.module.parameters()).dtype
    for step in range(4):
        operations = Operations()
        with dsx_comm.count_traffic() as traffic, operations if step == 3 else contextlib.nullcontext():
            for micro in range(accumulation):
                engine.backward(engine(torch.randn(config["train_micro_batch_size_per_gpu"], WIDTH, dtype=dtype)))
                if step == 3 and micro == accumulation - 1:
                    held = engine.optimizer.state_bytes_by_tier()
                engine.step()
        sent = traffic.by_op()
    # The optimizer's kernels are not dispatched: a plan counts 12 operations for each element with its two states.
    updates = 12 * engine.optimizer.state_bytes()["optimizer"] // 8
    engine.destroy()
    return held, sent, operations.flops + updates


def train_all(rank, world, make, cases):
    torch.set_num_threads(1)
    return {name: train(rank, world, make, case) for name, case in cases.items()}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_state_bytes_and_messages_are_those_of_real_ranks(world):
    from dsx.planning import Machine, plan

    real = run_ranks(train_all, world, Stack, CASES, timeout=300)
    here = Machine.of_this_host()
    for name, case in CASES.items():
        found = plan(Stack, case, world_size=world, machine=here, batch=torch.zeros(2, WIDTH))
        largest = max(range(world), key=lambda rank: sum(sum(t.values()) for t in real[rank][name][0].values()))
        held, sent, flops = real[largest][name]
        planned = {kind: tiers for kind, tiers in found.bytes.items() if kind != "model buffers"}
        assert planned == held, (name, planned, held)
        assert set(found.messages) == set(sent), (name, found.messages, sent)
        for op, (calls, nbytes) in sent.items():
            assert found.messages[op] == (calls, pytest.approx(nbytes, rel=1e-12)), (name, op)
        assert found.flops == flops, (name, found.flops / flops)
        by_link = found.traffic["inside host"] + found.traffic["between hosts"]
        assert by_link == pytest.approx(found.sent_bytes, rel=1e-9), name


class Experts(nn.Module):
    """Experts over both ranks between dense layers."""

    def __init__(self):
        from dsx.moe import MoE

        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)), num_experts=4, ep_size=2)

    def forward(self, x):
        return self.moe(self.first(x))[0].float().square().mean()


def test_experts_over_ranks():
    from dsx.planning import Machine, plan

    cases = {"stage 2": settings(2), "stage 0": settings(0, 2)}
    for case in cases.values():
        case["train_micro_batch_size_per_gpu"] = 8
    real = run_ranks(train_all, 2, Experts, cases, timeout=300)[0]
    for name, case in cases.items():
        found = plan(Experts, case, world_size=2, machine=Machine.of_this_host(), batch=torch.zeros(8, WIDTH))
        held, sent, _ = real[name]
        assert {kind: tiers for kind, tiers in found.bytes.items() if kind != "model buffers"} == held, name
        for op in ("reduce_scatter_tensor", "all_reduce"):
            assert found.messages.get(op) == (None if op not in sent else (sent[op][0], pytest.approx(sent[op][1])))
        assert found.messages["all_to_all_single"][0] == sent["all_to_all_single"][0], name


def test_a_rank_alone_and_a_thousand():
    """What the formulas of ZeRO say, where no process could run: 16 bytes for each parameter, divided."""
    from dsx.planning import plan

    whole = sum(p.numel() for p in Stack().parameters() if p.requires_grad)
    for world in (1, 1024):
        found = plan(
            Stack, settings(3, stage3_param_persistence_threshold=0), world_size=world, machine="H100-SXM",
            batch=torch.zeros(2, WIDTH),
        )  # fmt: skip
        padding = 2.0 if world > 1 else 1.01  # small shards are rounded up to 16 bytes
        assert 16 * whole / world <= sum(found.state_bytes().values()) <= padding * 16 * whole / world
        hosts = world // found.ranks_per_host
        assert (found.traffic["between hosts"] > 0) == (hosts > 1)
        assert found.sent_bytes == 0 if world == 1 else found.sent_bytes >= 3 * 4 * whole * (world - 1) / world
