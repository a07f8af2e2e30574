"""Twelve kinds of models in plain PyTorch, each with its multiply-accumulates worked out by hand from its sizes.

Used by `test_monitor_flops_models.py` and by `bench/flops_models.py`; loaded by path, since test files import no
others. `forward` counts every product of the forward pass; `backward` those of the backward pass of a loss that sums
the output, with inputs that need no gradient: twice the products, less the gradient by the input where the input is
data, plus what fused attention computes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    """A model, what to call it with, and its multiply-accumulates."""

    name: str
    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    forward: int
    backward: int


# - Parts


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int | None = None, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.kv, self.size, self.causal = heads, kv_heads or heads, width // heads, causal
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, self.kv * self.size, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        source = x if memory is None else memory
        q, k, v = (
            part(value).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part, value in ((self.q, x), (self.k, source), (self.v, source))
        )
        k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and memory is None)
        return self.out(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, attention: Attention, mlp: nn.Module, width: int, cross: Attention | None = None) -> None:
        super().__init__()
        self.attention, self.mlp, self.cross = attention, mlp, cross
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory)
        return x + self.mlp(self.norms[2](x))


def mlp(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class Stack(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, vocabulary: int, width: int, blocks: list[Block], tied: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(vocabulary, width), nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class EncoderDecoder(nn.Module):
    def __init__(self, vocabulary: int, width: int, encoder: list[Block], decoder: list[Block]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.encoder, self.decoder = nn.ModuleList(encoder), nn.ModuleList(decoder)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.embed(source)
        for block in self.encoder:
            memory = block(memory)
        x = self.embed(target)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


class Vision(nn.Module):
    def __init__(self, patch: int, width: int, blocks: list[Block], classes: int) -> None:
        super().__init__()
        self.patch, self.blocks = nn.Conv2d(3, width, patch, patch), nn.ModuleList(blocks)
        self.head = nn.Linear(width, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False)
        self.na, self.nb = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))) + self.short(x))


class Recurrent(nn.Module):
    def __init__(self, vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(hidden, vocabulary)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Experts(nn.Module):
    """Every token goes to its best two experts; the rows of each are gathered, so the sum of rows is known."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        weight, chosen = self.router(rows).softmax(-1).topk(2, -1)
        y = torch.zeros_like(rows)
        for expert in range(len(self.up)):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.silu(rows[token] @ self.up[expert])
            y = y.index_add(0, token, (hidden @ self.down[expert]) * weight[token, place, None])
        return y.view_as(x)


class Einsum(nn.Module):
    """A bilinear layer over two indices, all of it einsum."""

    def __init__(self, width: int, heads: int, size: int) -> None:
        super().__init__()
        self.inside = nn.Parameter(torch.randn(width, heads, size) * 0.1)
        self.outside = nn.Parameter(torch.randn(heads, size, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("btd,dhs->bhts", x, self.inside)
        scores = torch.einsum("bhts,bhus->bhtu", hidden, hidden)
        return torch.einsum("bhtu,bhus,hsd->btd", scores, hidden, self.outside)


class Windowed(nn.Module):
    """Block-sparse attention: every block of queries sees its own block of keys and the one before."""

    def __init__(self, width: int, heads: int, block: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.heads, self.block = heads, block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = self.qkv(x).unflatten(1, (-1, self.block)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (t.transpose(2, 3) for t in blocks.unbind(3))  # (batch, blocks, heads, block, size)
        k, v = (torch.cat((t.roll(1, 1), t), 3) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return self.out((scores.softmax(-1) @ v).transpose(2, 3).flatten(3).flatten(1, 2))


# - Counts


def attention(batch: int, length: int, width: int, heads: int, kv: int | None = None, memory: int | None = None) -> int:
    """Projections of an `Attention`, in multiply-accumulates."""
    keys = (kv or heads) * (width // heads)
    return batch * (length * 2 * width * width + (memory or length) * 2 * width * keys)


def scores(batch: int, length: int, width: int, memory: int | None = None) -> int:
    """Both products of dense attention."""
    return 2 * batch * length * (memory or length) * width


def trained(products: int, dense_attention: int, from_data: int = 0) -> int:
    """Backward of `products` (attention's left out) and of fused attention, which computes q k^T once more."""
    return 2 * products - from_data + dense_attention * 5 // 2


def _cases() -> list[Case]:
    b, t, d, h, f, v = 2, 24, 64, 4, 256, 320
    head, dense = b * t * d * v, b * t * 2 * d * f
    layers = 2
    project, both = layers * attention(b, t, d, h), layers * scores(b, t, d)

    def tokens(length: int = t) -> torch.Tensor:
        return torch.arange(b * length).view(b, length) % v

    def blocks(count: int, **options: Any) -> list[Block]:
        return [Block(Attention(d, h, **options), mlp(d, f), d) for _ in range(count)]

    cases = []

    def case(name: str, build: Callable[[], tuple[nn.Module, tuple[Any, ...]]], forward: int, backward: int) -> None:
        cases.append(Case(name, build, forward, backward))

    plain = project + layers * dense + head
    case("GPT", lambda: (Stack(v, d, blocks(layers)), (tokens(),)), plain + both, trained(plain, both))

    gated, grouped = layers * b * t * 3 * d * f, layers * attention(b, t, d, h, kv=2)
    llama = grouped + gated + head
    case(
        "Llama",
        lambda: (Stack(v, d, [Block(Attention(d, h, 2), Gated(d, f), d) for _ in range(layers)]), (tokens(),)),
        llama + both,
        trained(llama, both),
    )
    case("BERT", lambda: (Stack(v, d, blocks(layers, causal=False)), (tokens(),)), plain + both, trained(plain, both))

    s = 16  # length of the target
    cross = attention(b, s, d, h, memory=t)
    t5 = attention(b, t, d, h) + dense + attention(b, s, d, h) + cross + b * s * 2 * d * f + b * s * d * v
    t5_dense = scores(b, t, d) + scores(b, s, d) + scores(b, s, d, t)
    case(
        "T5",
        lambda: (
            EncoderDecoder(
                v,
                d,
                [Block(Attention(d, h, causal=False), mlp(d, f), d)],
                [Block(Attention(d, h), mlp(d, f), d, cross=Attention(d, h))],
            ),
            (tokens(), tokens(s)),
        ),
        t5 + t5_dense,
        trained(t5, t5_dense),
    )

    patches = b * 3 * 8 * 8 * d * 16  # 16 patches of 8 x 8
    p = 16
    vit = layers * (attention(b, p, d, h) + b * p * 2 * d * f) + b * d * 10 + patches
    vit_dense = layers * scores(b, p, d)
    case(
        "ViT",
        lambda: (Vision(8, d, blocks(layers, causal=False), 10), (torch.randn(b, 3, 32, 32),)),
        vit + vit_dense,
        trained(vit, vit_dense, from_data=patches),
    )

    stem = b * 16 * 16 * 16 * 3 * 9
    stage1 = b * 16 * 16 * (16 * 16 * 9 * 2 + 16 * 16)
    stage2 = b * 8 * 8 * (32 * 16 * 9 + 32 * 32 * 9 + 32 * 16)
    resnet = stem + stage1 + stage2 + b * 32 * 10
    case(
        "ResNet",
        lambda: (
            nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1, bias=False),
                Residual(16, 16, 1),
                Residual(16, 32, 2),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(32, 10),
            ),
            (torch.randn(b, 3, 16, 16),),
        ),
        resnet,
        2 * resnet - stem,
    )

    hidden = 96
    lstm = b * t * 4 * hidden * (d + hidden) + b * t * 4 * hidden * 2 * hidden
    case(
        "LSTM",
        lambda: (Recurrent(v, d, hidden), (tokens(),)),
        lstm + b * t * hidden * v,
        2 * (lstm + b * t * hidden * v),
    )

    moe = attention(b, t, d, h) + b * t * d * 4 + 2 * b * t * 2 * d * f + head
    case(
        "MoE",
        lambda: (Stack(v, d, [Block(Attention(d, h), Experts(d, f, 4), d)]), (tokens(),)),
        moe + scores(b, t, d),
        trained(moe, scores(b, t, d)),
    )

    one = b * 30 * 16 * 4 * 3  # length 32, kernel 3
    two = b * 30 * 8 * 16
    case(
        "conv1d",
        lambda: (nn.Sequential(nn.Conv1d(4, 16, 3), nn.ReLU(), nn.Conv1d(16, 8, 1)), (torch.randn(b, 4, 32),)),
        one + two,
        2 * two + one,
    )
    volume = b * 6**3 * 8 * 2 * 27
    case(
        "conv3d",
        lambda: (nn.Sequential(nn.Conv3d(2, 8, 3), nn.Conv3d(8, 4, 2, groups=2)), (torch.randn(b, 2, 8, 8, 8),)),
        volume + b * 5**3 * 4 * 4 * 8,
        volume + 2 * b * 5**3 * 4 * 4 * 8,
    )

    size = d // h
    lift, pairs = b * t * d * h * size, b * h * t * t * size
    case(
        "einsum",
        lambda: (Einsum(d, h, size), (torch.randn(b, t, d),)),
        2 * lift + 2 * pairs,
        3 * lift + 4 * pairs,  # the first product has no gradient by the data
    )

    window = b * t * 4 * d * d + 2 * b * t * 2 * 8 * d  # blocks of 8, each sees two
    case(
        "sparse attention",
        lambda: (Windowed(d, h, 8), (torch.randn(b, t, d),)),
        window,
        2 * window - b * t * 3 * d * d,
    )
    case(
        "tied weights",
        lambda: (Stack(v, d, blocks(1), tied=True), (tokens(),)),
        plain - project // 2 - dense + both // 2,
        trained(plain - project // 2 - dense, both // 2),
    )
    return cases


CASES = _cases()
