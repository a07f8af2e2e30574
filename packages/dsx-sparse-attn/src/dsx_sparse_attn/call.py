"""One attention call as a record, which is checked once and passed to every backend.

Shapes: q [batch, heads, seq, dim], k and v [batch, kv_heads, seq, dim], layout [1 or heads, blocks, blocks],
bias (added to the scaled scores) [1 or batch, 1 or heads, 1 or seq, seq], key_bias [batch, seq], seed int64 [1].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["AttentionCall", "Gradients", "compute_dtype"]


class AttentionCall(NamedTuple):
    """The arguments of one call. It is a tuple, because it is made in every call and a frozen dataclass takes ten times
    as long.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Tensor
    bias: Tensor | None
    key_bias: Tensor | None
    seed: Tensor | None  # the seed of the dropout mask; None without dropout
    scale: float
    block: int
    causal: bool
    dropout_p: float

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def blocks(self) -> int:
        """Blocks that cover the sequence; the last may be short."""
        return self.layout.shape[-1]

    @property
    def drop_below(self) -> int:
        """A weight is dropped if its 32-bit hash is below this."""
        return min(int(self.dropout_p * 2**32), 2**32 - 1) if self.seed is not None else 0

    @property
    def keep_scale(self) -> float:
        """The factor on weights that are kept."""
        return 1.0 / (1.0 - self.dropout_p) if self.seed is not None else 1.0

    @property
    def work(self) -> float:
        """The number of multiplications of a dense forward pass."""
        batch, heads, seq, dim = self.q.shape
        return 2.0 * batch * heads * seq * seq * dim

    def describe(self) -> str:
        """The call in words, for errors."""
        options = [
            f"q {tuple(self.q.shape)}",
            f"k, v {tuple(self.k.shape)}",
            f"{self.q.dtype} on {self.q.device.type}".replace("torch.", ""),
            f"block {self.block}",
        ]
        options += [name for name, on in (("bias", self.bias is not None), ("causal", self.causal)) if on]
        options += ["key mask"] if self.key_bias is not None else []
        options += [f"dropout {self.dropout_p}"] if self.seed is not None else []
        return ", ".join(options)


class Gradients(NamedTuple):
    """The result of backward; `bias` is None if its gradient was not asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
