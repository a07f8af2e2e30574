"""Peaks of memory by plan and by PyTorch's allocator in real ranks, over random configurations: stages, batches,
offload, recomputation, pipelines and experts.
"""

import gc
import json
import random
import statistics

import pytest
import torch
from dsx_testkit import run_ranks
from dsx_testkit.allocated import count_allocations, most_allocated
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("dsx_pipe")

WIDTH, LENGTH, WORDS = 96, 64, 256
HOST = {"device": "cpu"}
SEED, COUNT, ALONE = 25, 64, 16


class Block(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.again = again
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def body(self, x):
        q, k, v = self.mix(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.again and torch.is_grad_enabled() else self.body(x)


class Spread(nn.Module):
    """Experts over the ranks, between dense layers."""

    def __init__(self, ranks):
        from dsx.moe import MoE

        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.moe = MoE(WIDTH, expert, num_experts=4, ep_size=ranks)

    def forward(self, x):
        return x + self.moe(x)[0]


class Loss(nn.Module):
    """The last layer gives the loss, so that the same layers do for one process and for stages."""

    def forward(self, logits):
        return logits.float().square().mean()


def build(kind, again, world):
    experts = [Spread(world)] if kind == "experts" else []
    blocks = [Block(again), Block(again), *experts, Block(again), Block(again)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS), Loss())


def drawn(number, world):
    """A configuration: (kind of model, recomputation, configuration)."""
    draw = random.Random(1000 * SEED + number)
    kind = draw.choice(["plain", "plain", "pipeline", "experts"] if world > 1 else ["plain"])
    stage = draw.choice([0, 1, 2, 3] if kind != "experts" else [0, 1, 2])
    zero: dict[str, object] = {"stage": stage}
    if stage and draw.random() < 0.3:
        zero["offload_optimizer"] = HOST
        if stage == 3 and draw.random() < 0.5:
            zero["offload_param"] = HOST
    if draw.random() < 0.3:
        zero["reduce_bucket_size"] = 50_000
    config = {
        "train_micro_batch_size_per_gpu": draw.choice([1, 2, 4, 8, 16]),
        "gradient_accumulation_steps": draw.choice([1, 2, 3, 5]),
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    if draw.random() < 0.3:
        config["bf16"] = {"enabled": True}
    if kind == "pipeline":
        config["pipeline"] = {"stages": 2}
    if kind == "experts":
        config["train_micro_batch_size_per_gpu"] = max(2, config["train_micro_batch_size_per_gpu"])
    return kind, draw.random() < 0.4, config


def measured(rank, world, cases):
    """The most that PyTorch's allocator has given out at one time in the fourth step, by number of the case."""
    import dsx

    torch.set_num_threads(1)
    count_allocations()
    found = {}
    for number, (kind, again, config) in cases.items():
        with most_allocated() as before:
            pass
        torch.manual_seed(0)
        tokens = torch.randint(0, WORDS, (config["train_micro_batch_size_per_gpu"], LENGTH))
        engine, *_ = dsx.initialize(model=build(kind, again, world), config=json.loads(json.dumps(config)))
        for _ in range(3):
            step(engine, kind, tokens, config)
        with most_allocated() as now:
            step(engine, kind, tokens, config)
        found[number] = now.most - before.first
        engine.destroy()
        del engine, tokens
        gc.collect()
    return found


def step(engine, kind, tokens, config):
    steps = config["gradient_accumulation_steps"]
    if kind == "pipeline":
        engine.train_batch(iter([(tokens, None)] * steps))
        return
    for _ in range(steps):
        engine.backward(engine(tokens))
        engine.step()


def errors_of(numbers, world):
    """How far the planned peak of every rank is from the measured one, by name."""
    from dsx.planning import Machine, plan

    cases = {number: drawn(number, world) for number in numbers}
    real = [{} for _ in range(world)]
    for wanted in sorted({kind for kind, _, _ in cases.values()}):  # a job has one kind of model
        some = {number: case for number, case in cases.items() if case[0] == wanted}
        found = run_ranks(measured, world, some, timeout=900, backend="gloo" if world > 1 else None)
        for mine, more in zip(real, found):
            mine.update(more)
    here, errors = Machine.of_this_host(), {}
    for number, (kind, again, config) in cases.items():
        tokens = torch.zeros(config["train_micro_batch_size_per_gpu"], LENGTH, dtype=torch.int64)
        batch = (tokens, None) if kind == "pipeline" else tokens
        found = plan(lambda kind=kind, again=again: build(kind, again, world), config, world_size=world, machine=here,
                     batch=batch, changes=False)  # fmt: skip
        planned = {0: found.peak_bytes}
        if found.pipeline is not None:
            planned = {one.rank: one.peak_bytes for one in found.pipeline.ranks}
        for rank, size in planned.items():
            name = f"{number} of {world}, {kind}, rank {rank}, recomputed {again}, {config}"
            errors[name] = size / real[rank][number] - 1.0
    return errors


def judge(errors, middle, most):
    found = {name: abs(error) for name, error in errors.items()}
    worst = {name: errors[name] for name in sorted(found, key=found.__getitem__)[-3:]}
    assert statistics.median(found.values()) <= middle and max(found.values()) <= most, (
        statistics.median(found.values()), worst,
    )  # fmt: skip


def test_some():
    kinds = {}
    for number in range(ALONE, COUNT):
        kinds.setdefault(drawn(number, 2)[0], number)
    assert set(kinds) == {"plain", "pipeline", "experts"}
    judge(errors_of(kinds.values(), 2), 0.08, 0.08)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all():
    judge({**errors_of(range(ALONE), 1), **errors_of(range(ALONE, COUNT), 2)}, 0.03, 0.08)
