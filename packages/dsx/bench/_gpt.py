"""The model of the step-time bench: a plain GPT (d 512, 6 layers, 8 heads, byte vocabulary; 19 M parameters)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, length, width]."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(a)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns the loss of next-byte prediction."""

    def __init__(
        self, width: int = 512, layers: int = 6, heads: int = 8, vocabulary: int = 256, length: int = 128
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """ids, targets [batch, length] int64 -> scalar loss."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch(step: int, rank: int, size: int = 4, length: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """The same data for every system: drawn from (step, rank)."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, 256, (size, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
