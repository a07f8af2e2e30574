"""Layers with more than attention in pipelines whose sequences are cut over ranks: experts, whose tokens go to other
ranks, and packed samples, whose documents travel with the activations. Losses and norms are those of one process.
"""

import dsx
import dsx_activations
import dsx_comm
import pytest
import torch
from dsx_comm import parallel_groups
from dsx_moe import MoE
from dsx_testkit import run_ranks
from torch import nn
from torch.nn import functional as F

dsx_pipe = pytest.importorskip("dsx_pipe")

WIDTH, WORDS, LENGTH, MICRO, UPDATES, LR = 16, 24, 13, 2, 2, 0.5


class Words(nn.Module):
    """Tokens and documents to hidden states and documents."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)

    def forward(self, value):
        tokens, documents = value
        return self.embed(tokens), documents


class Attention(nn.Module):
    """Calls the attention over sequence shards by itself, with the documents that come with its input."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        x, documents = value
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(x).split([WIDTH, 8, 8], -1))
        group = parallel_groups.get_sequence_parallel_group() if dsx_comm.is_initialized() else None
        y = dsx_activations.sequence_attention(
            q, k, v, group, causal=True, documents=documents, length=LENGTH, order="zigzag"
        )
        return x + self.out(y.transpose(1, 2).flatten(2)), documents


class Mixed(nn.Module):
    """Experts of each token. No token is dropped, so that it does not matter which rank has it."""

    def __init__(self, ep_size):
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.moe = MoE(WIDTH, expert, 4, ep_size, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)

    def forward(self, value):
        x, documents = value
        return x + self.moe(x)[0], documents


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, value):
        return self.out(value[0])


def kinds(ep_size):
    if ep_size is None:  # packed samples alone
        return [Words, Attention, Attention, Head]
    return [Words, Attention, lambda: Mixed(ep_size), Attention, lambda: Mixed(ep_size), Head]


def token_loss(logits, targets):
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    group = parallel_groups.get_sequence_data_parallel_group() if dsx_comm.is_initialized() else None
    return dsx_activations.token_mean(total, (targets != -100).sum(), group)


def micro_batches(packed):
    """((tokens, documents), targets): the second sample has three documents, and the end of the first is padding."""
    draw = torch.Generator().manual_seed(2)
    found = []
    for _ in range(UPDATES * MICRO):
        tokens = torch.randint(0, WORDS, (2, LENGTH + 1), generator=draw)
        documents, targets = torch.zeros(2, LENGTH, dtype=torch.int64), tokens[:, 1:].clone()
        if packed:
            documents[0, 10:] = -1
            documents[1] = torch.tensor([0] * 3 + [1] * 6 + [2] * 4)
            targets[documents < 0] = -100
        found.append(((tokens[:, :-1], documents), targets))
    return found


def one_process(ep_size):
    built = []
    for index, layer in enumerate(kinds(1 if ep_size else None)):
        torch.manual_seed(5 + index)
        built.append(layer())
    model, found, data = nn.Sequential(*built), [], iter(micro_batches(ep_size is None))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(UPDATES):
        total = 0.0
        for _ in range(MICRO):
            inputs, targets = next(data)
            loss = token_loss(model(inputs), targets) / MICRO
            loss.backward()
            total += loss.item()
        norm = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm))
    return found


def trained(rank, world, ep_size, stage):
    module = dsx_pipe.PipelineModule(
        [dsx_pipe.LayerSpec(layer) for layer in kinds(ep_size)], loss_fn=token_loss, partition_method="uniform",
        topology=dsx_comm.ProcessTopology(("pipe", "data", "sequence"), (2, 1, 2)), seed_layers=True, base_seed=5,
        activation_checkpoint_interval=1,
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": LR}}, "zero_optimization": {"stage": stage},
        "sequence_parallel_size": 2, "sequence_parallel": {"convert": False}, "steps_per_print": None,
    }  # fmt: skip
    engine, *_ = dsx.initialize(model=module, config=config)
    group = parallel_groups.get_sequence_parallel_group()

    def cut(item):
        (tokens, documents), targets = item
        tokens, documents, targets = (
            dsx_activations.shard_sequence(t, group, order="zigzag") for t in (tokens, documents, targets)
        )
        return (tokens, documents), targets

    engine.set_batch_fn(cut)
    data = iter(micro_batches(ep_size is None))
    return [(engine.train_batch(data).item(), engine.last_step.grad_norm) for _ in range(UPDATES)]


@pytest.mark.parametrize(("ep_size", "stage"), [(None, 1), (1, 1), (2, 0)])
def test_losses_and_norms_are_those_of_one_process(ep_size, stage):
    """Packed samples; then experts that every rank has, and experts spread over the ranks of a sequence."""
    expected = one_process(ep_size)
    for found in run_ranks(trained, 4, ep_size, stage, timeout=120):
        assert found == [pytest.approx(pair, rel=2e-6) for pair in expected]
