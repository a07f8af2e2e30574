"""APOLLO: gradients scaled by what AdamW would do, as seen in a random space of low rank (Zhu, Zhang, Cong, Liu, Park,
Chandra, Long, Pan, Wang, Lee, 2024: "APOLLO: SGD-like Memory, AdamW-level Performance", arXiv:2412.05270).

For a matrix W with gradient G, whose smaller side has n and whose larger side has m elements (as m x n):

    L = G P^T                                 P: r x n of independent normal numbers with variance 1 / r
    exp_avg, exp_avg_sq of L                  as AdamW's, m x r each
    N = exp_avg / (sqrt(exp_avg_sq) + eps)
    s = |N| / (|L| + 1e-8)                    norms of each of the m rows (`channel`), or of all (`tensor`)
    U = s G                                   no norm of U is more than `growth` times that of the step before
    W = (1 - lr * wd) W - lr alpha sqrt(1 - beta2^t) / (1 - beta1^t) U

P is new after every `update_proj_gap` steps; the moments stay. With rank 1, `scale_type` tensor and alpha = sqrt(128)
this is the paper's APOLLO-Mini. The norm's limiter is Fira's (Chen et al., 2024, arXiv:2410.01623). P is a function of
seed and step (`low_rank.py`) and kept nowhere; the device counts the steps, so that the host waits for nothing.

State: 2 m r numbers of a matrix and two more, none per element. Left out: projections by singular vectors (GaLore).
Which tensors, which matrices in them, and the step: `matrices.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import HyperparameterError
from .low_rank import check_rank, gaussian, rank_of
from .matrices import MatrixOptimizer, Shape, check_rates, check_split

__all__ = ["Apollo"]

_SCALES = ("channel", "tensor")
_TINY = 1e-8


class Apollo(MatrixOptimizer):
    """AdamW's scaling of gradients from moments of low rank, for matrices; AdamW for everything else.

    State of a matrix, fp32: `exp_avg_low` and `exp_avg_sq_low` (larger side, r), `steps` and `update_norm` (one number
    each).

    Args:
        params: parameters, or groups of them. A group may have `use_muon` (False: AdamW) and any of the settings below.
        lr: of both rules.
        betas, weight_decay: of both rules; `weight_decay` is decoupled.
        eps: of both rules.
        rank: r (never more than the smaller side); None: by `rank_fraction`.
        rank_fraction: r as a part of the smaller side.
        alpha: factor of updates; the published program's `scale` is its square.
        scale_type: "channel" or "tensor".
        update_proj_gap: steps with one projection.
        growth: most by which the norm of an update grows from one step to the next; None: it is not limited.
        seed: of the projections.
        stacked, split_rows: see `optim/matrices.py`.

    Raises:
        HyperparameterError: a setting is out of its range.
        TensorError: a group of matrices has a tensor of less than two dimensions, or one that cannot be split so.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        rank: int | None = None,
        rank_fraction: float = 0.25,
        alpha: float = 1.0,
        scale_type: str = "channel",
        update_proj_gap: int = 200,
        growth: float | None = 1.01,
        seed: int = 0,
        stacked: bool | None = None,
        split_rows: int | Sequence[int] = 1,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rank": rank,
            "rank_fraction": rank_fraction, "alpha": alpha, "scale_type": scale_type,
            "update_proj_gap": update_proj_gap, "growth": growth, "seed": seed, "use_muon": True, "stacked": stacked,
            "split_rows": split_rows,
        }  # fmt: skip
        super().__init__(params, defaults, {True: lr, False: lr})

    def direction(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The gradient itself: nothing is kept of single elements."""
        return grad

    def of_matrix(self, matrix: Tensor, group: Mapping[str, Any], states: Mapping[str, Tensor] | None = None) -> Tensor:
        """U with its scale and AdamW's correction of bias."""
        if states is None:
            raise HyperparameterError("Apollo.of_matrix: got no states, expected the matrix' moments")
        first, second, steps, last = (states[key] for key in ("exp_avg_low", "exp_avg_sq_low", "steps", "update_norm"))
        beta1, beta2 = group["betas"]
        grad = matrix.to(first.dtype, copy=True)  # a product may have other bits at another address
        wide = grad.shape[0] < grad.shape[1]
        tall = grad.T if wide else grad
        low = tall @ self._projection(steps, first.shape[1], tall.shape[1], group).T
        steps.add_(1)
        first.lerp_(low, 1 - beta1)
        second.mul_(beta2).addcmul_(low, low, value=1 - beta2)
        normed = first / second.sqrt().add_(group["eps"])
        dims = (1,) if group["scale_type"] == "channel" else (0, 1)
        scale = torch.linalg.vector_norm(normed, dim=dims, keepdim=True)
        scale = scale / (torch.linalg.vector_norm(low, dim=dims, keepdim=True) + _TINY)
        update = tall * scale
        if group["growth"] is not None:
            norm, most = torch.linalg.vector_norm(update), group["growth"]
            over = torch.where(last > 0, (norm / (last + _TINY)).clamp(min=most) / most, 1.0)
            update = update / over
            last.copy_(norm / over)
        count = steps.double()
        unbiased = (1 - beta2**count).sqrt() / (1 - beta1**count) * group["alpha"]
        update = update * unbiased.to(update.dtype)
        return update.T if wide else update

    def _projection(self, steps: Tensor, rank: int, size: int, group: Mapping[str, Any]) -> Tensor:
        """P (rank, size) of the step that comes after so many."""
        number = steps.reshape(()).to(torch.int64) // group["update_proj_gap"]
        seed = (number * 1_000_003 + group["seed"]) % (1 << 31)
        return gaussian(seed, 0, rank * size).view(rank, size).mul_(1 / math.sqrt(rank))

    def apply(self, param: Tensor, update: Tensor, matrix: tuple[int, int], group: Mapping[str, Any]) -> None:
        """W of these elements."""
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-group["lr"])

    def work(self, matrix: tuple[int, int], group: Mapping[str, Any]) -> float:
        """Floating-point operations of `of_matrix`; a random number counts as 30."""
        r = rank_of(matrix, group)
        return 2.0 * r * matrix[0] * matrix[1] + 30.0 * r * min(matrix) + 4.0 * matrix[0] * matrix[1]

    def matrix_states(self, matrix: tuple[int, int], group: Mapping[str, Any]) -> dict[str, Shape]:
        """Moments (larger side, r), the number of steps, and the norm of the latest update."""
        moments = (max(matrix), rank_of(matrix, group))
        return {"exp_avg_low": moments, "exp_avg_sq_low": moments, "steps": (1,), "update_norm": (1,)}

    def check_settings(self, group: Mapping[str, Any]) -> None:
        """Raise HyperparameterError if a setting of a group is out of its range."""
        check_rates(group, "alpha")
        check_split(group, "update_proj_gap")
        check_rank(group)
        if group["growth"] is not None and not group["growth"] >= 1:
            raise HyperparameterError(f"growth: got {group['growth']}, expected at least 1, or None")
        if group["scale_type"] not in _SCALES:
            raise HyperparameterError(f"scale_type: got {group['scale_type']!r}, expected {' or '.join(_SCALES)}")
