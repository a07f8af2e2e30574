"""Small models and configurations for the tests of dsx-compress."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Self-attention with separate projections, as in BERT."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return self.dense(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward network, both residual."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(functional.gelu(self.up(x)))


class TinyBert(nn.Module):
    """Embedding, blocks, a classifier of every token."""

    def __init__(self, layers: int = 2, width: int = 16, words: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TinyNet(nn.Module):
    """Convolutions with batch norms, and a linear layer behind a flattened image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.relu(self.bn2(self.conv2(x)))
        return self.fc(functional.max_pool2d(x, 2).flatten(1))


def ids(rows: int = 4, length: int = 8, words: int = 20, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, words, (rows, length), generator=torch.Generator().manual_seed(seed))


def method(name: str, shared: dict[str, Any] | None = None, **groups: Any) -> dict[str, Any]:
    """A configuration with one method. A group is `params` with `modules` and `related_modules` beside them."""
    made = {}
    for group, settings in groups.items():
        outer = {key: settings[key] for key in ("modules", "related_modules") if key in settings}
        params = {key: value for key, value in settings.items() if key not in outer}
        made[group] = {**outer, **({"params": params} if params else {})}
    return {name: {"shared_parameters": {"enabled": True, **(shared or {})}, "different_groups": made}}


def train(model: nn.Module, scheduler: Any, steps: int, *, optimizer: Any = None, first: int = 0) -> list[float]:
    """Teach a `TinyBert` to repeat its inputs; the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(first, first + steps):
        x = ids(seed=step)
        loss = functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses
