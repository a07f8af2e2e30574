"""Models over cut sequences, drawn by chance: loss and gradients are those of plain torch in one process, in float64.

Drawn are the length, the numbers of heads and key heads, ranks of a sequence beside data-parallel ranks and pipeline
stages, masks, packed and padded samples, the ZeRO stage, recomputation, experts, order, team and overlap.
"""

import dataclasses
import random

import dsx
import dsx_comm
import pytest
import torch
from dsx_comm import parallel_groups
from dsx_testkit import run_ranks
from torch import nn
from torch.nn import functional as F

dsx_activations = pytest.importorskip("dsx_activations")
pytest.importorskip("dsx_moe")
dsx_pipe = pytest.importorskip("dsx_pipe")

WORDS, FEATURES, SAMPLES = 17, 4, 2
BOUND = 1e-6
"""Of a loss and of a gradient, relative to its largest value or to 1. One rounding of fp32 is 6e-8."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One case; the fields are what the module's text lists."""

    seed: int
    length: int
    heads: int
    key_heads: int
    causal: bool
    packed: bool
    padded: bool
    sequence: int
    stages: int
    zero: int
    recomputed: bool
    experts: bool
    order: str
    team: int | None
    overlap: int

    @property
    def micro_batches(self):
        return 2 if self.stages > 1 else 1


def draw_case(world, seed):
    draw = random.Random(seed)
    stages = draw.choice([1, 1, 2]) if world % 2 == 0 else 1
    sequence = draw.choice([n for n in range(1, world // stages + 1) if world // stages % n == 0][-2:])
    heads = draw.choice([1, 2, 3, 4, 6])
    alone = stages == 1  # in a pipeline documents would travel, and experts have groups of their own
    return Drawn(
        seed,
        length=draw.randint(sequence, 65),
        heads=heads,
        key_heads=draw.choice([n for n in range(1, 7) if heads % n == 0]),
        causal=draw.random() < 0.6,
        packed=alone and draw.random() < 0.4,
        padded=alone and draw.random() < 0.4,
        sequence=sequence,
        stages=stages,
        zero=draw.randrange(4),
        recomputed=draw.random() < 0.5,
        experts=alone and draw.random() < 0.25,
        order=draw.choice(["plain", "zigzag"]),
        team=draw.choice([None, None, *(n for n in range(1, sequence + 1) if sequence % n == 0)]),
        overlap=draw.choice([1, 2]),
    )


class Embed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(65, width)

    def forward(self, value):
        tokens, positions = value
        return self.words(tokens) + self.places(positions)


class Block(nn.Module):
    """`seen`: (batch, 1, tokens, tokens) for the oracle, which has no documents."""

    def __init__(self, case):
        super().__init__()
        width, self.case, self.seen = case.heads * FEATURES, case, None
        self.sizes = [width, case.key_heads * FEATURES, case.key_heads * FEATURES]
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, sum(self.sizes)), nn.Linear(width, width)
        self.mlp = (
            _experts(width) if case.experts else nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))
        )

    def forward(self, x):
        parts = self.qkv(self.norm(x)).split(self.sizes, -1)
        q, k, v = (t.unflatten(-1, (-1, FEATURES)).transpose(1, 2) for t in parts)
        causal = self.case.causal and self.seen is None
        y = F.scaled_dot_product_attention(q, k, v, self.seen, is_causal=causal, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        found = self.mlp(x)
        return x + (found[0] if self.case.experts else found)


def _experts(width):
    from dsx.moe import MoE

    expert = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))
    return MoE(width, expert, num_experts=2, k=1, capacity_factor=8.0, eval_capacity_factor=8.0, min_capacity=512,
               use_rts=False)  # fmt: skip


class Whole(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.layers, self.recomputed = nn.ModuleList(layers(case)), case.recomputed

    def forward(self, value):
        for layer in self.layers:
            value = (
                dsx_activations.checkpoint(layer, value)
                if self.recomputed and isinstance(layer, Block)
                else layer(value)
            )
        return value


def layers(case):
    torch.manual_seed(case.seed)
    width = case.heads * FEATURES
    return [Embed(width), Block(case), Block(case), nn.Linear(width, WORDS)]


def samples(case, replicas):
    """(tokens, targets, documents) of each micro-batch and replica."""
    draw = torch.Generator().manual_seed(case.seed)
    found = []
    for _ in range(case.micro_batches * replicas):
        tokens, targets = (torch.randint(0, WORDS, (SAMPLES, case.length), generator=draw) for _ in range(2))
        documents = torch.zeros(SAMPLES, case.length, dtype=torch.int64)
        if case.packed:
            documents = (torch.rand(SAMPLES, case.length, generator=draw) < 0.1).cumsum(1)
        if case.padded:
            behind = int(torch.randint(1, case.length + 1, (), generator=draw))
            documents[0, behind:] = -1
        targets[(torch.rand(SAMPLES, case.length, generator=draw) < 0.2) | (documents < 0)] = -100
        found.append((tokens, targets, documents))
    return [found[n * replicas : (n + 1) * replicas] for n in range(case.micro_batches)]


def seen_of(case, documents):
    """What a token sees by definition. Padding sees itself, which counts nowhere."""
    places = torch.arange(case.length)
    seen = (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, :, None]
    if case.causal:
        seen &= places[:, None] >= places
    return (seen | torch.eye(case.length, dtype=torch.bool))[:, None]


def expected(case, replicas):
    """Mean loss and gradients in float64, by the names of `Whole`."""
    with parallel_groups.speaking_of(parallel_groups.groups_of(None)):
        model = Whole(dataclasses.replace(case, recomputed=False)).double()
    total = 0.0
    for parts in samples(case, replicas):
        tokens, targets, documents = (torch.cat(one) for one in zip(*parts))
        for layer in model.layers[1:3]:
            layer.seen = seen_of(case, documents)
        logits = model((tokens, torch.arange(case.length)[None]))
        counted = (targets != -100).sum().clamp(min=1)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / counted / case.micro_batches
        loss.backward()
        total += loss.item()
    zero = torch.zeros(())
    return total, {name: zero if p.grad is None else p.grad for name, p in model.named_parameters()}


def token_loss(logits, targets):
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    group = parallel_groups.get_sequence_data_parallel_group()
    return dsx_activations.token_mean(total, (targets != -100).sum(), group)


def config(case):
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": case.zero, "stage3_param_persistence_threshold": 0},
        "sequence_parallel_size": case.sequence,
        "sequence_parallel": {"order": case.order, "team": case.team, "overlap": case.overlap},
    }


def trained(case, replicas):
    """Mean loss and gradients of an engine's update with a learning rate of 1, by the names of `Whole`."""
    if case.stages > 1:
        model = dsx_pipe.PipelineModule(
            layers(case), loss_fn=token_loss, partition_method="uniform",
            activation_checkpoint_interval=int(case.recomputed),
            topology=dsx_comm.ProcessTopology(("pipe", "data", "sequence"), (case.stages, replicas, case.sequence)),
        )  # fmt: skip
        prefix, replica = "layers.", model.grid.data.rank
    else:
        model, prefix, replica = Whole(case), "", dsx_comm.get_rank() // case.sequence
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, *_ = dsx.initialize(model=model, config=config(case))
    parallel = engine.sequence_parallel

    def cut(one):
        tokens, targets, documents = one
        if parallel is None:
            return (tokens, torch.arange(case.length)[None].expand_as(tokens)), targets, documents
        places = parallel.positions(case.length).expand(SAMPLES, -1)
        return (parallel.shard(tokens), places), parallel.shard(targets), parallel.shard(documents)

    mine = [cut(parts[replica]) for parts in samples(case, replicas)]
    if case.stages > 1:
        loss = engine.train_batch(iter([one[:2] for one in mine]))
    else:
        ((inputs, targets, documents),) = mine
        if parallel is not None:
            parallel.describe(length=case.length, documents=documents if case.packed or case.padded else None)
        elif case.packed or case.padded:
            for layer in model.layers[1:3]:
                layer.seen = seen_of(case, documents)
        loss = token_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
    with dsx.zero.GatheredParameters(list(engine.module.parameters())):
        found = {prefix + name: before[name] - p.detach() for name, p in engine.module.named_parameters()}
    loss = loss.item()
    engine.destroy()
    return loss, found


def many(rank, world, number, seed):
    for one in range(seed, seed + number):
        case = draw_case(world, one)
        replicas = world // case.sequence // case.stages
        right, gradients = expected(case, replicas)
        loss, found = trained(case, replicas)
        assert abs(loss - right) <= BOUND * max(1.0, abs(right)), (case, loss, right)
        for name, value in found.items():
            away = (value.double() - gradients[name]).abs().max().item()
            assert away <= BOUND * max(1.0, gradients[name].abs().max().item()), (case, name, away)


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow), 4]
)
def test_a_few_random_models(world):
    run_ranks(many, world, 5, 100 * world, timeout=200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_five_hundred_random_models(world):
    """With other seeds in every run, which the message of a failed case shows."""
    run_ranks(many, world, 130, random.randrange(10**6), timeout=3500)
