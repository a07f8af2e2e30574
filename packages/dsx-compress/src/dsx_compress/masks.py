"""Pure functions from scores to masks, which say which elements a pruning keeps.

A mask keeps exactly ceil(ratio x count) elements, those of the largest scores. Among equal scores the first in memory
order are kept, so that every rank and every device finds the same mask.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch

from .errors import CompressionError

__all__ = [
    "block_mask", "block_shape", "kept_count", "n_of_m_mask", "row_norms", "sparsity_at", "straight_through_top",
    "top_mask",
]  # fmt: skip


def kept_count(ratio: float, count: int) -> int:
    """ceil(ratio x count), computed with the decimal that was written, without floating-point error."""
    return math.ceil(Fraction(str(ratio)) * count)


def top_mask(scores: torch.Tensor, keep: int) -> torch.Tensor:
    """Boolean mask of the shape of `scores` that keeps the `keep` largest; of equal scores it keeps the first."""
    flat = scores.detach().reshape(-1)
    if keep >= flat.numel():
        return torch.ones_like(scores, dtype=torch.bool)
    if keep <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = flat.kthvalue(flat.numel() - keep + 1).values
    above, equal = flat > threshold, flat == threshold
    mask = above | (equal & (equal.cumsum(0) <= keep - above.sum()))
    return mask.view(scores.shape)


class _StraightThroughTop(torch.autograd.Function):
    @staticmethod
    def forward(scores: torch.Tensor, keep: int) -> torch.Tensor:
        return top_mask(scores, keep).to(scores.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return gradients[0], None


def straight_through_top(scores: torch.Tensor, keep: int) -> torch.Tensor:
    """The mask as 0 and 1 in the dtype of `scores`; its gradient goes to the scores unchanged (Sanh et al. 2020)."""
    return _StraightThroughTop.apply(scores, keep)  # pyright: ignore[reportReturnType]


def row_norms(weight: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """L1 norm of every slice along `dim`, such as a row of a linear layer or an output channel of a convolution."""
    others = [d for d in range(weight.dim()) if d != dim]
    return weight.detach().abs().sum(others) if others else weight.detach().abs()


def block_shape(pattern: str, shape: torch.Size, name: str) -> tuple[int, int]:
    """Rows and columns of the blocks of a weight that is viewed as a matrix (first dimension, all others).

    Raises:
        CompressionError: the blocks do not cover the weight.
    """
    rows, columns = (1, int(pattern.split(":")[1])) if ":" in pattern else tuple(map(int, pattern.split("x")))
    height, width = shape[0], shape.numel() // shape[0]
    if height % rows or width % columns:
        raise CompressionError(
            f"{name}: block_pattern {pattern} does not divide the weight of {height} x {width}; exclude the module "
            "(excluded_modules) or choose another pattern"
        )
    return rows, columns


def block_mask(scores: torch.Tensor, block: tuple[int, int], keep_ratio: float) -> torch.Tensor:
    """Boolean mask that keeps the ceil(keep_ratio x blocks) blocks with the largest sums of scores."""
    rows, columns = block
    flat = scores.detach().reshape(scores.shape[0], -1)
    height, width = flat.shape[0] // rows, flat.shape[1] // columns
    sums = flat.view(height, rows, width, columns).sum((1, 3))
    mask = top_mask(sums, min(sums.numel(), math.ceil(keep_ratio * sums.numel() - 1e-9)))
    return mask[:, None, :, None].expand(height, rows, width, columns).reshape(scores.shape)


def n_of_m_mask(scores: torch.Tensor, keep: int, of: int) -> torch.Tensor:
    """Boolean mask that keeps the `keep` largest of every `of` consecutive inputs; of equal ones it keeps the first."""
    groups = scores.detach().reshape(-1, of)
    order = groups.argsort(dim=1, descending=True, stable=True)
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order[:, :keep], True)
    return mask.view(scores.shape)


def sparsity_at(step: int, start: int, end: int, final: float) -> float:
    """Cubic growth from 0 at `start` to `final` at `end`: final (1 - (1 - t)^3) (Zhu and Gupta 2017)."""
    if step >= end:
        return final
    t = max(0.0, (step - start) / (end - start))
    return final * (1.0 - (1.0 - t) ** 3)
