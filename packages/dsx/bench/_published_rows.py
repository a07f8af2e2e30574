"""Published step times, and the models that they were measured with: what `planner.py published` and `fit` go over.

A row has what its source says. `assumed` names the settings that the source leaves open. `fits` marks the rows to which
the constants of a device are fitted. The others are held back, and always whole models or whole sources, so that no
row has a neighbour of the same model among those that were fitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

__all__ = ["ROWS", "Row", "example", "maker", "settings", "some_again"]

MOSAIC = "MosaicML llm-foundry, scripts/train/benchmarking/README.md, H100 80GB BF16"


@dataclass(frozen=True)
class Row:
    """A published step time of data-parallel training with sharded states (ZeRO stage 3, FSDP).

    Attributes:
        source: who published it.
        model: a key of `MPT_SIZES`.
        machine: of the planner's table.
        length: tokens of a sample.
        devices: in all.
        micro, accumulation: batch of a device.
        recomputes: blocks are computed again in backward.
        tokens_per_second: of each device, as published.
        fits: constants are fitted to it.
        assumed: settings that the source leaves open.
    """

    source: str
    model: str
    machine: str
    length: int
    devices: int
    micro: int
    accumulation: int
    recomputes: bool
    tokens_per_second: float
    fits: bool = False
    assumed: str = ""


MPT_SIZES = {
    "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40),
    "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
"""Width, layers, heads. With biases, learned positions and tied embeddings they have the table's parameter counts."""
_FITTED = ("1b", "7b", "30b")


def _mosaic(model: str, length: int, devices: int, micro: int, accumulation: int, again: bool, rate: float) -> Row:
    return Row(
        MOSAIC, model, "H100-SXM", length, devices, micro, accumulation, again, rate, fits=model in _FITTED
    )  # fmt: skip


ROWS = (
    _mosaic("760m", 2048, 8, 24, 2, False, 63147),
    _mosaic("760m", 4096, 8, 12, 2, False, 55459),
    _mosaic("1b", 2048, 8, 14, 1, False, 45455),
    _mosaic("1b", 8192, 8, 3, 4, False, 29157),
    _mosaic("1b", 2048, 64, 20, 1, False, 44402),
    _mosaic("1b", 512, 8, 56, 4, False, 52275),
    _mosaic("3b", 2048, 16, 10, 3, False, 24142),
    _mosaic("3b", 2048, 64, 6, 3, False, 22525),
    _mosaic("3b", 8192, 8, 3, 6, False, 16578),
    _mosaic("3b", 1024, 8, 20, 6, False, 27046),
    _mosaic("7b", 2048, 8, 6, 1, False, 10643),
    _mosaic("7b", 4096, 8, 16, 2, True, 8611),
    _mosaic("7b", 8192, 8, 8, 2, True, 6935),
    _mosaic("13b", 2048, 8, 2, 1, False, 4792),
    _mosaic("13b", 4096, 8, 10, 3, True, 4717),
    _mosaic("13b", 2048, 64, 2, 1, False, 4800),
    _mosaic("30b", 2048, 32, 14, 3, True, 2308),
    _mosaic("30b", 4096, 8, 1, 21, True, 1802),
    _mosaic("70b", 2048, 64, 8, 4, True, 1039),
    _mosaic("30b", 2048, 8, 3, 21, True, 2002),
)  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.mix(self.first(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class MPT(nn.Module):
    def __init__(self, row: Row) -> None:
        super().__init__()
        width, layers, heads = MPT_SIZES[row.model]
        self.again = row.recomputes
        self.tokens, self.places = nn.Embedding(50368, width), nn.Embedding(row.length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50368, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), tokens.flatten())


def some_again(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Every second matrix product and all that is no product is computed again, attention is kept: torchtitan's
    selective mode.
    """

    def contexts() -> Any:
        counts = {False: 0, True: 0}  # in forward, and when it is repeated

        def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = func._overloadpacket.__name__
            if name in ("mm", "addmm"):
                counts[context.is_recompute] += 1
                odd = counts[context.is_recompute] % 2
                return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE
            kept = name.startswith("_scaled_dot_product")
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def maker(row: Row) -> Callable[[], nn.Module]:
    """A function that makes the model of a row."""
    return lambda: MPT(row)


def example(row: Row) -> Any:
    """One micro-batch of a row."""
    return torch.zeros(row.micro, row.length, dtype=torch.int64)


def settings(row: Row) -> dict[str, object]:
    """The configuration of a row."""
    return {
        "train_micro_batch_size_per_gpu": row.micro,
        "gradient_accumulation_steps": row.accumulation,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }
