"""Attention and layers whose chunks wait in host memory: results and all gradients are those of plain torch, and
nothing is read before it has come back (a lane that runs nothing before it must).
"""

from dataclasses import replace

import dsx_activations
import pytest
import torch
from dsx_activations import ActivationArgumentError, run_in_host_chunks, sequence_attention, shard_sequence
from dsx_comm.lanes import DeferringLane, lanes_from
from dsx_testkit import run_ranks
from dsx_testkit.sequences import Case, check, expected, got
from torch import nn

WIDTH = 12
MASKS = ({}, {"causal": False}, {"window": 7}, {"packed": True, "padded": True})


def attention_by_chunks(rank, world, lanes):
    base = Case(5, 2, 6, 2, 23, True, None, False, False, "zigzag", None, 1)
    for number, mask in enumerate(MASKS):
        case = replace(base, **mask, order=("plain", "zigzag")[number % 2], heads=(6, 3)[number % 2], key_heads=3)
        if not lanes:
            check_with(case, 3)
            continue
        for chunks in (1, 3, 40):
            with lanes_from(lambda device: DeferringLane()):
                check_with(case, chunks)


def check_with(case, chunks):
    for mine, theirs in zip(got(case, host_chunks=chunks), expected(case)):
        torch.testing.assert_close(mine, shard_sequence(theirs, dim=2, order=case.order), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("world, lanes", [(1, True), (2, True), (3, False)])
def test_attention_from_host_memory(world, lanes):
    run_ranks(attention_by_chunks, world, lanes)


def test_dropout_and_soft_caps_of_chunks():
    case = Case(5, 1, 2, 1, 9, True, None, False, False, "plain", None, 1, softcap=0.7)
    with lanes_from(lambda device: DeferringLane()):
        check_with(case, 3)
        torch.manual_seed(0)
        found = got(replace(case, softcap=None, dropout=0.3), seed=3, host_chunks=2)
    torch.manual_seed(0)
    for mine, right in zip(found, got(replace(case, softcap=None, dropout=0.3), seed=3)):
        torch.testing.assert_close(mine, right)
    check(case)


class Layer(nn.Module):
    """Attention with positions, a residual stream and an MLP with dropout."""

    def __init__(self, heads, key_heads, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.key_heads = heads, key_heads
        self.project, self.finish = Project(heads, key_heads), Finish(heads, dropout)


class Project(nn.Module):
    def __init__(self, heads, key_heads):
        super().__init__()
        self.sizes = [heads * 4, key_heads * 4, key_heads * 4]
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, sum(self.sizes))

    def forward(self, x, positions):
        x = self.qkv(self.norm(x)) * (1 + positions[..., None] / 50).to(x.dtype)
        return tuple(t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in x.split(self.sizes, -1))


class Finish(nn.Module):
    def __init__(self, heads, dropout):
        super().__init__()
        self.out, self.drop = nn.Linear(heads * 4, WIDTH), nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x, attended):
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.drop(self.mlp(x))


def plain(layer, x, **given):
    q, k, v = layer.project(x, torch.arange(x.shape[1])[None])
    return layer.finish(x, sequence_attention(q, k, v, one_process(), **given))


def one_process():
    """A group of this process alone."""
    import dsx_comm

    if not dsx_comm.is_initialized():
        return None
    groups = [dsx_comm.new_group([rank]) for rank in range(dsx_comm.get_world_size())]
    return groups[dsx_comm.get_rank()]


def layers(rank, world, heads, key_heads, order, lanes, given):
    import dsx_comm

    layer, length = Layer(heads, key_heads).double(), 29
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    weight = torch.randn(2, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    whole = x.clone().requires_grad_()
    y = plain(layer, plain(layer, whole, **given), **given)
    (y * weight).sum().backward()
    right = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    mine = shard_sequence(x, order=order).requires_grad_()
    maker = DeferringLane if lanes else dsx_comm.lanes.HostLane
    with lanes_from(lambda device: maker()):
        out = mine
        for _ in range(2):
            out = run_in_host_chunks(layer.project, layer.finish, out, chunks=3, order=order, length=length, **given)
        (out * shard_sequence(weight, order=order)).sum().backward()
    torch.testing.assert_close(out, shard_sequence(y, order=order))
    torch.testing.assert_close(mine.grad, shard_sequence(whole.grad, order=order))
    for name, p in layer.named_parameters():
        dsx_comm.all_reduce(p.grad) if world > 1 else None
        torch.testing.assert_close(p.grad, right[name], msg=lambda text, name=name: f"{name}: {text}")


DOCUMENTS = torch.tensor([[0] * 12 + [1] * 17, [3] * 20 + [-1] * 9])


@pytest.mark.parametrize(
    "world, heads, key_heads, order, lanes, given",
    [
        (1, 4, 2, "plain", True, {"causal": True}),
        (2, 4, 2, "zigzag", True, {"causal": True, "documents": DOCUMENTS}),
        (2, 3, 1, "plain", False, {"window": 5}),
        (3, 2, 2, "zigzag", True, {"causal": True}),  # a rank without heads
    ],
)
def test_layers_by_chunks(world, heads, key_heads, order, lanes, given):
    run_ranks(layers, world, heads, key_heads, order, lanes, given)


def test_random_numbers_and_evaluation_of_layers():
    layer = Layer(2, 1, dropout=0.5)
    x = torch.randn(1, 10, WIDTH, requires_grad=True)
    torch.manual_seed(1)
    y = run_in_host_chunks(layer.project, layer.finish, x, chunks=2, causal=True)
    y.sum().backward()
    # the gradient by the last bias counts the kept elements: those of the forward
    grad, kept = layer.finish.mlp[-1].bias.grad, 0
    torch.manual_seed(1)
    for part in (x[:, :5], x[:, 5:]):
        kept = kept + layer.finish.drop(torch.ones_like(part)).sum((0, 1))
    torch.testing.assert_close(grad, kept)
    layer.eval()
    with torch.no_grad():
        again = run_in_host_chunks(layer.project, layer.finish, x, chunks=3, causal=True)
    torch.testing.assert_close(again, plain(layer, x, causal=True))


def test_mistakes_are_named():
    layer, x = Layer(2, 1), torch.randn(1, 6, WIDTH)
    q = torch.randn(1, 2, 4, 4)
    with pytest.raises(ActivationArgumentError, match="host_chunks: got 0"):
        sequence_attention(q, q, q, host_chunks=0)
    with pytest.raises(ActivationArgumentError, match="a function as kernel"):
        sequence_attention(q, q, q, host_chunks=2, kernel=lambda q, k, v, **_: q)
    for message, call in {
        "chunks: got 0": lambda: run_in_host_chunks(layer.project, layer.finish, x, chunks=0),
        r"got x of shape \(6, 12\)": lambda: run_in_host_chunks(layer.project, layer.finish, x[0], chunks=2),
        "got method without parameters=": lambda: run_in_host_chunks(layer.project.forward, layer.finish, x, chunks=2),
        r"uses a tensor of shape \(12,\)": lambda: run_in_host_chunks(
            layer.project, layer.finish, x, chunks=2, parameters=list(layer.project.parameters())[2:]
        ),
        "project gave shapes": lambda: run_in_host_chunks(
            lambda x, positions: (x, x, x), layer.finish, x, chunks=2, parameters=[]
        ),
        "finish gave shape": lambda: run_in_host_chunks(
            layer.project, lambda x, y: x[:, :1], x, chunks=2, parameters=layer.project.parameters()
        ),
        "documents: got shape": lambda: run_in_host_chunks(
            layer.project, layer.finish, x, chunks=2, documents=torch.zeros(1, 3, dtype=torch.int64)
        ),
    }.items():
        with pytest.raises(ActivationArgumentError, match=message):
            call()
    assert "run_in_host_chunks" in dsx_activations.__all__
