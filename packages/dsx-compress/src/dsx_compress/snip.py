"""Pruning of blocks during training by the score of the loss' first-order change (SNIP)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from . import masks
from .errors import CompressionError
from .quantizers import require_finite
from .techniques import Technique

__all__ = ["SnipMask"]


def _no_scale() -> float:
    return 1.0


class SnipMask(Technique):
    """Prunes blocks step by step: those with the smallest running score of |weight x gradient| (SNIP, Lee et al. 2019).

    While it is switched on, every backward pass adds |w dL/dw| to the score of each weight w; w is the value that the
    layer used, and L the loss without its scale (`loss_scale`). After every step the score is multiplied by `momentum`.
    From `offset` to `end` the mask is recomputed every `stride` steps with the sparsity of `masks.sparsity_at`; after
    that it does not change.

    Args:
        end: step at which the final sparsity is reached.
        stride: steps between two prunings.
        pattern: shape of a block: `4x1` (rows x columns), or `2:4` (keep 2 of 4 consecutive inputs).
        ratio: fraction that is kept at the end; with `N:M` it is N/M.
        like: the weight; gives shape and device.
    """

    momentum = 0.9

    def __init__(
        self, group: str, layer: str, offset: int, end: int, stride: int, pattern: str, ratio: float, like: torch.Tensor
    ) -> None:
        super().__init__("sparse_pruning", group, layer, offset)
        self.end, self.stride, self.pattern = end, stride, pattern
        self.n_of_m = tuple(map(int, pattern.split(":"))) if ":" in pattern else None
        self.ratio = self.n_of_m[0] / self.n_of_m[1] if self.n_of_m else ratio
        self.block = masks.block_shape(pattern, like.shape, layer)
        self.register_buffer("mask", torch.ones(like.shape, dtype=torch.bool, device=like.device))
        self.register_buffer("score", torch.zeros(like.shape, dtype=torch.float32, device=like.device))
        self.observed = 0
        self.loss_scale: Callable[[], float] = _no_scale
        """The scale that losses have now. A scheduler that knows it sets it."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        if not self.enabled:
            return weight
        masked = weight * self.get_buffer("mask")
        if self.training and masked.requires_grad:
            used = masked.detach()  # a pruned weight is 0 here, so that it adds nothing to its score
            masked.register_hook(lambda gradient: self._observe(used, gradient))
        return masked

    def _observe(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        size = (weight.to(torch.float32) * gradient.detach().to(torch.float32)).abs() / self.loss_scale()
        # The optimizer skips a step whose gradients overflowed; infinities and NaNs must not enter the scores either.
        self.get_buffer("score").add_(torch.where(torch.isfinite(size), size, 0.0))
        self.observed += 1

    def pending_score(self) -> torch.Tensor:
        """The scores. The scheduler averages them over the ranks before a mask is made from them."""
        return self.get_buffer("score")

    def due(self, step: int) -> bool:
        """Whether the mask is recomputed when `step` steps are done."""
        inside = self.offset < step <= max(self.end, self.offset + 1)
        return inside and (step == max(self.end, self.offset + 1) or (step - self.offset) % self.stride == 0)

    def advance(self, step: int, weight: torch.Tensor | None, factor: int) -> None:
        super().advance(step, weight, factor)
        if self.due(step):
            self._prune(masks.sparsity_at(step, self.offset, self.end, 1.0 - self.ratio))
        if self.enabled:
            self.get_buffer("score").mul_(self.momentum)

    def _prune(self, sparsity: float) -> None:
        score = self.get_buffer("score")
        require_finite(score, f"{self.layer}: scores of snip_momentum")
        if not self.observed:
            raise CompressionError(
                f"{self.layer}: snip_momentum has seen no gradient since it was switched on; it needs training steps "
                "with backward passes through this layer before the mask can be made"
            )
        if self.n_of_m:
            keep, of = self.n_of_m
            now = max(keep, of - math.floor(of * sparsity + 1e-9))
            mask = masks.n_of_m_mask(score, now, of)
        else:
            mask = masks.block_mask(score, self.block, 1.0 - sparsity)
        self.get_buffer("mask").copy_(mask)

    def kept(self) -> torch.Tensor:
        """The mask."""
        return self.get_buffer("mask")

    def finish(self, weight: torch.Tensor) -> bool:
        if bool(self.kept().all()) and self.ratio < 1:
            self._prune(1.0 - self.ratio)
        return super().finish(weight)

    def progress(self) -> dict[str, Any]:
        return {"observed": self.observed}

    def restore(self, progress: dict[str, Any]) -> None:
        self.observed = int(progress["observed"])

    def __getstate__(self) -> dict[str, Any]:
        # The scale belongs to a run: a copy of the model does not take the run's scaler along.
        return {**self.__dict__, "loss_scale": _no_scale}
