"""Experts under ZeRO stages 0 to 3: the losses, the norm and the weights of one process that holds everything."""

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_moe import MoE, PackedExperts
from dsx_testkit import run_ranks
from torch import nn

HIDDEN, EXPERTS, WORLD = 8, 4, 4


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self, ep_size, packed, options):
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        expert = PackedExperts(EXPERTS, HIDDEN, 12, activation="relu") if packed else lambda i: FeedForward()
        self.moe = MoE(HIDDEN, expert, EXPERTS, ep_size, **options)

    def forward(self, x):
        out, l_aux, _ = self.moe(torch.tanh(self.dense(x)))
        return x + out, l_aux


class Model(nn.Module):
    def __init__(self, ep_size, packed, options):
        super().__init__()
        self.blocks = nn.ModuleList([Block(ep_size, packed, options) for _ in range(2)])
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        loss = x.new_zeros(())
        for block in self.blocks:
            x, l_aux = block(x)
            loss = loss + 0.1 * l_aux
        return self.head(x).square().mean() + loss


def build(ep_size, packed, drop):
    torch.manual_seed(7)
    options = {
        "k": 2,
        "drop_tokens": drop,
        "capacity_factor": 0.6,
        "min_capacity": 1,
        "top2_2nd_expert_sampling": False,
    }
    return Model(ep_size, packed, options)


def batch(rank, step):
    """In one step all tokens are equal, so that all go to the same two experts and the others get none."""
    x = torch.randn(6 + 2 * rank, HIDDEN, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x[:1].expand(6, HIDDEN).clone() if step == 1 else x


def oracle(packed, drop, steps):
    model = build(1, packed, drop)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        each = [model(batch(rank, step)) for rank in range(WORLD)]
        (sum(each) / WORLD).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
        losses.append([loss.item() for loss in each])
    return losses, norms


def train(rank, world, stage, ep_size, packed, drop, steps):
    dsx_comm.init_distributed()
    model = build(ep_size, packed, drop)
    model, optimizer = dsx_zero.shard(model, lambda params: torch.optim.AdamW(params, lr=0.02), stage=stage)
    losses, norms = [], []
    for step in range(steps):
        loss = model(batch(rank, step))
        loss.backward()
        norms.append(float(optimizer.step(max_norm=0.3).grad_norm))
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def compare(stage, ep_size, packed, drop, steps=4):
    losses, norms = oracle(packed, drop, steps)
    for rank, (mine, my_norms) in enumerate(run_ranks(train, WORLD, stage, ep_size, packed, drop, steps)):
        assert mine == pytest.approx([step[rank] for step in losses], rel=1e-4, abs=1e-6)
        assert my_norms == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize(
    ("stage", "ep_size", "packed", "drop"),
    [(0, 4, False, True), (1, 2, True, False), (2, 2, False, False), (3, 2, False, True), (3, 4, True, False)],
)
def test_training_equals_one_process(stage, ep_size, packed, drop):
    compare(stage, ep_size, packed, drop)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("drop", [True, False])
def test_training_equals_one_process_everywhere(stage, ep_size, packed, drop):
    compare(stage, ep_size, packed, drop)


def _held(rank, world, ep_size):
    dsx_comm.init_distributed()
    found = {}
    for stage in (1, 2, 3):
        made = []

        def adam(params, made=made):
            made.append(torch.optim.AdamW(params, lr=0.02))
            return made[0]

        model, optimizer = dsx_zero.shard(build(ep_size, True, False), adam, stage=stage)
        model(batch(rank, 0)).backward()
        optimizer.step()
        found[stage] = sum(state["exp_avg"].numel() for state in made[0].state.values())
        optimizer.release()
    return found


@pytest.mark.parametrize("ep_size", [2, 4])
def test_states_of_experts_are_divided_among_all_ranks(ep_size):
    """Over the ranks that share the experts out, and over those that hold the same ones: nothing is kept twice."""
    everything = sum(p.numel() for p in build(1, True, False).parameters())
    results = run_ranks(_held, WORLD, ep_size)
    for stage in (1, 2, 3):
        held = [found[stage] for found in results]
        assert everything <= sum(held) <= everything + 64 * WORLD  # flat buffers are padded a little
        assert max(held) <= 1.2 * everything / WORLD + 16
