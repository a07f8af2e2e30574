"""Dion: momentum in low rank, orthonormalised, with what low rank leaves out fed back (Ahn, Xu, Abreu, Langford, 2025:
"Dion: Distributed Orthonormalized Updates", arXiv:2504.05295, algorithm 1).

For a matrix W (m x n) with gradient G, momentum M (m x n) and a basis Q (n x r):

    B = M + G
    P = orthonormal(B Q)                      one step of power iteration, by a QR decomposition
    R = B^T P
    M = B - (1 - mu) P R^T                    error feedback: what the r columns have not said stays in M
    Q = R, each column divided by its norm
    W = (1 - lr * wd) W - lr sqrt(m / n) P Q^T

The arithmetic of a step is 8 m n r operations and the decomposition of m x r, where Muon's is some 20 m n min(m, n). Q
begins as random numbers, which are a function of seed and place (as the random bits of `low_bit.py`). A column of R
that is zero leaves its column of Q as it was, and changes nothing.

Which tensors, which matrices in them, and the step: `matrices.py`. Left out: the paper's way of sharding a single
matrix, in which P, Q and R travel instead of M; a sharded optimizer brings whole matrices together (dsx-zero).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import HyperparameterError
from .low_rank import check_rank, gaussian, rank_of
from .matrices import MatrixOptimizer, Shape, check_rates

__all__ = ["Dion"]


class Dion(MatrixOptimizer):
    """Orthonormalised momentum of low rank for matrices; AdamW for everything else.

    State of a matrix: `momentum` (rows, columns) and `Q` (columns, r), fp32.

    Args:
        params: parameters, or groups of them. A group may have `use_muon` (False: AdamW) and any of the settings below.
        lr: of matrices.
        adam_lr: of everything else; None: `lr`.
        mu: of the momentum.
        rank_fraction: r as a part of the smaller side of a matrix, at least one.
        rank: r itself (never more than the smaller side); None: by `rank_fraction`.
        weight_decay: decoupled, in both rules.
        epsilon: added to norms of columns that are divided by.
        betas, eps: of AdamW.
        seed: of the first Q.
        stacked, split_rows: see `optim/matrices.py`.

    Raises:
        HyperparameterError: a setting is out of its range.
        TensorError: a group of matrices has a tensor of less than two dimensions, or one that cannot be split so.
    """

    feeds_back = True

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        *,
        adam_lr: float | None = None,
        mu: float = 0.95,
        rank_fraction: float = 0.25,
        rank: int | None = None,
        weight_decay: float = 0.01,
        epsilon: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        seed: int = 0,
        stacked: bool | None = None,
        split_rows: int | Sequence[int] = 1,
    ) -> None:
        defaults = {
            "lr": lr, "mu": mu, "rank_fraction": rank_fraction, "rank": rank, "weight_decay": weight_decay,
            "epsilon": epsilon, "betas": betas, "eps": eps, "seed": seed, "use_muon": True, "stacked": stacked,
            "split_rows": split_rows,
        }  # fmt: skip
        super().__init__(params, defaults, {True: lr, False: lr if adam_lr is None else adam_lr})

    def direction(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        """B of these elements."""
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(grad)
        return state["momentum"].add_(grad)

    def of_matrix(
        self, matrix: Tensor, group: Mapping[str, Any], states: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """P Q^T with the new Q, and P R^T."""
        if states is None:
            raise HyperparameterError("Dion.of_matrix: got no states, expected the matrix' Q")
        basis = states["Q"]
        # Copies, because a product of matrices may have other bits where its factors begin at another address.
        b = matrix.to(basis.dtype, copy=True)
        p = torch.linalg.qr(b @ basis.clone()).Q
        r = b.T @ p
        norms = torch.linalg.vector_norm(r, dim=0)
        normed = r / (norms + group["epsilon"])
        basis.copy_(torch.where(norms > 0, normed, basis))
        return p @ normed.T, p @ r.T

    def apply(self, param: Tensor, update: Tensor, matrix: tuple[int, int], group: Mapping[str, Any]) -> None:
        """W of these elements."""
        lr = group["lr"]
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(update, alpha=-lr * math.sqrt(matrix[0] / matrix[1]))

    def feed_back(self, param: Tensor, result: Tensor, group: Mapping[str, Any]) -> None:
        """M of these elements, from P R^T."""
        self.state[param]["momentum"].sub_(result, alpha=1 - group["mu"])

    def work(self, matrix: tuple[int, int], group: Mapping[str, Any]) -> float:
        """Floating-point operations of `of_matrix`."""
        (m, n), r = matrix, self.matrix_states(matrix, group)["Q"][1]
        return 8.0 * m * n * r + 4.0 * m * r * r

    def matrix_states(self, matrix: tuple[int, int], group: Mapping[str, Any]) -> dict[str, Shape]:
        """Q (columns, r)."""
        return {"Q": (matrix[1], rank_of(matrix, group))}

    def initial_state(
        self, key: str, shape: Shape, start: int, stop: int, group: Mapping[str, Any], device: torch.device
    ) -> Tensor:
        """Numbers of a normal distribution, by their place in Q."""
        return gaussian(torch.full((), group["seed"], dtype=torch.int64, device=device), start, stop)

    def check_settings(self, group: Mapping[str, Any]) -> None:
        """Raise HyperparameterError if a setting of a group is out of its range."""
        check_rates(group, "epsilon")
        check_rank(group)
        if not 0 <= group["mu"] <= 1:
            raise HyperparameterError(f"mu: got {group['mu']}, expected a number from 0 to 1")
