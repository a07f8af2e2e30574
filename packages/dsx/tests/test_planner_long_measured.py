"""The planned peak of a long sequence beside what the allocator of real processes gives out in a step: lengths of a
thousandth of those that are planned for 8 B parameters, on one and two ranks, with recomputation, tiles and a loss
without all logits.
"""

import dsx
import dsx_activations
import pytest
import torch
from dsx.planning import Machine, plan
from dsx_testkit import run_ranks
from dsx_testkit.allocated import count_allocations, most_allocated
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, KEYS, WORDS, STEPS = 128, 4, 2, 512, 4
LENGTHS = {1: 500, 2: 3700}  # of 500,000 and 3.7 million


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        q, k, v = (t.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + dsx_activations.run_in_tiles(self.mlp, x, tiles=8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = dsx_activations.checkpoint(block, x)
        return dsx_activations.linear_cross_entropy(x, self.head.weight, tokens, chunk=64)


def config(ranks):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
        **({"sequence_parallel_size": ranks} if ranks > 1 else {}),
    }


def measured(rank, world):
    count_allocations()
    torch.set_num_threads(1)
    length = LENGTHS[world]
    settings = config(world)
    if world > 1:
        settings["sequence_parallel"] = {"length": length}
    with most_allocated() as before:
        pass
    engine, *_ = dsx.initialize(model=Model(), config=settings)
    tokens = torch.zeros(1, length // world, dtype=torch.int64)
    for step in range(STEPS):
        with most_allocated() as found:
            engine.backward(engine(tokens))
            engine.step()
    return found.most - before.first


@pytest.mark.parametrize("ranks", sorted(LENGTHS))
def test_the_planned_peak_is_within_3_percent_of_a_real_steps(ranks):
    tokens = torch.zeros(1, LENGTHS[ranks], dtype=torch.int64)
    planned = plan(Model, config(ranks), world_size=ranks, machine=Machine.of_this_host(), batch=tokens, changes=False)
    for peak in run_ranks(measured, ranks):
        assert planned.peak_bytes == pytest.approx(peak, rel=0.03)
