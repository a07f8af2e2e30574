"""Models and groups of ranks on which activation checkpointing is tested, alone and sharded."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["SHAPE", "Axes", "Block", "Model", "Net", "example"]


class Block(nn.Module):
    """Attention, dropout, running statistics, and an activation that keeps much."""

    def __init__(self, width=32):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(y), 0.1)
        h = F.gelu(torch.tanh(torch.sigmoid(self.up(x)) * 2))
        return x + self.norm(self.down(h).transpose(1, 2)).transpose(1, 2)


class Model(nn.Module):
    def __init__(self, block=Block, layers=4):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 1)
        self.blocks = nn.ModuleList(block() for _ in range(layers))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


SHAPE = (4, 16, 32)
"""Of an input."""


class Net(nn.Module):
    def __init__(self, tiled):
        super().__init__()
        torch.manual_seed(0)
        self.tiled = tiled
        self.up, self.down, self.lm_head = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 101, bias=False)

    def mlp(self, x, scale):
        return self.down(F.gelu(self.up(x))) * scale

    def loss_of(self, x, y, mask=None):
        losses = F.cross_entropy(self.lm_head(x), y, reduction="none")
        return (losses if mask is None else losses * mask).sum()

    def forward(self, x, y, mask=None):
        scale = torch.tensor(2.0)
        if not self.tiled:
            h = x + self.mlp(x, scale)
            return self.loss_of(h.flatten(0, 1), y.flatten(), None if mask is None else mask.flatten())
        import dsx_activations  # lazy import: the models beside it need none of it

        weights = [self.up.weight, self.up.bias, self.down.weight, self.down.bias]
        h = x + dsx_activations.SequenceTiledCompute.apply(
            lambda x, scale: self.mlp(x, scale), x.shape[1], 4, ["x"], ["scale"], "x", weights, 1, None, x, scale
        )
        return dsx_activations.TiledFusedLogitsLoss.apply(
            Net.loss_of, self, h, y, mask, 4, list(self.lm_head.parameters()), "sum"
        )


def example(seed, batch=2, tokens=13):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, 8, generator=generator)
    return x, torch.randint(0, 101, (batch, tokens), generator=generator)


class Axes:
    """Neighbours are model-parallel: the mpu of a job of `world` ranks in pairs."""

    def __init__(self, rank, world, model):
        import torch.distributed as dist

        groups = {}
        for start in range(0, world, model):
            ranks = tuple(range(start, start + model))
            groups["model", ranks] = dist.new_group(ranks)
        for start in range(model):
            ranks = tuple(range(start, world, model))
            groups["data", ranks] = dist.new_group(ranks)
        for (kind, ranks), group in groups.items():
            if rank in ranks:
                setattr(self, f"get_{kind}_parallel_group", lambda group=group: group)
                setattr(self, f"get_{kind}_parallel_rank", lambda ranks=ranks: ranks.index(rank))
                setattr(self, f"get_{kind}_parallel_world_size", lambda ranks=ranks: len(ranks))
