"""Lamb: Adam's direction, scaled per tensor by the ratio of the parameter's norm to the direction's.

Two passes, since the ratio needs the whole tensor. The norms leave the first pass as squares, so that shards of a
tensor can be added up between the two: that is `norm_reducer`, the only place where communication comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import update
from ..errors import HyperparameterError
from ..spec import Algorithm, Batch, Hyper
from ._base import CopyOut, FusedOptimizer, Offsets

NormReducer = Callable[[Sequence[Tensor], Tensor], Tensor]


class FusedLamb(FusedOptimizer):
    """Lamb, on CPU and CUDA.

    m, v as Adam;  u = m / (sqrt(v) + eps) + wd p (or sqrt(v + eps) with `eps_inside_sqrt`);  ratio = clip(|p| / |u|,
    min_coeff, max_coeff), 1 when either norm is 0;  p -= lr * sqrt(1-b2^t)/(1-b1^t) * ratio * u
    (`bias_correction=False`: lr * ratio * u). `max_grad_norm` > 0 scales a group's gradients first, inside the same
    pass, as clipping the global norm of all (unscaled) gradients to it would.

    Sharded parameters: set `norm_reducer`, called exactly once in every `step`, also when this rank has no gradient at
    all: `norm_reducer(params, squares)` with `squares` fp64 [len(params), 2], row i holding |p|^2 and |u|^2 of what
    this rank holds of params[i] (in the order of the parameter groups, parameters without gradient left out); it
    returns the same shape with the sums over all ranks.
    """

    algorithm = Algorithm.LAMB
    state_names = ("exp_avg", "exp_avg_sq")
    own_options = ("norm_reducer", "_coefficients")
    elementwise = False
    needs_tensor_norms = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        *,
        state_dtype: torch.dtype | None = None,
        norm_reducer: NormReducer | None = None,
    ) -> None:
        if not max_coeff >= min_coeff:
            raise HyperparameterError(f"max_coeff: got {max_coeff}, expected at least min_coeff = {min_coeff}")
        self.norm_reducer = norm_reducer
        self._coefficients: list[Tensor] = []
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "eps": eps,
                "eps_inside_sqrt": eps_inside_sqrt,
                "weight_decay": weight_decay,
                "max_grad_norm": max_grad_norm,
                "max_coeff": max_coeff,
                "min_coeff": min_coeff,
                "amsgrad": amsgrad,
                "bias_correction": bias_correction,
                "state_dtype": state_dtype,
            },
        )

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios of the last step, in the order of the parameters that had gradients."""
        return [float(c) for part in self._coefficients for c in part.tolist()]

    def _hyper(self, group: dict[str, Any], step: int, grad_scale: float | Tensor) -> Hyper:
        return Hyper(
            lr=group["lr"],
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            bias_correction=group["bias_correction"],
            eps_inside=group["eps_inside_sqrt"],
            grad_scale=grad_scale,
        )

    def _collect(
        self, scale: float | Tensor, copy_out: CopyOut, offsets: Offsets
    ) -> tuple[list[Batch], list[dict[str, Any]]]:
        limits = [group["max_grad_norm"] for group in self.param_groups]
        clips = any(limit > 0 for limit in limits)
        if clips and self.norm_reducer is not None:
            raise HyperparameterError(
                f"max_grad_norm: got {limits}, expected 0 with sharded parameters: a rank does not know the global"
                " norm; let the engine clip, which its configuration says"
            )
        batches, states = super()._collect(scale, copy_out, offsets)
        if clips:
            self._clip(batches, scale, limits)
        return batches, states

    def _clip(self, batches: Iterable[Batch], scale: float | Tensor, limits: Sequence[float]) -> None:
        """Puts the clipping to each group's limit into the scale of its batches."""
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = update.squared_norms(grads).sum().sqrt() / scale
        scales = [scale * (norm / limit).clamp(min=1.0) if limit > 0 else scale for limit in limits]
        for batch in batches:
            batch.hyper = replace(batch.hyper, grad_scale=scales[batch.group])

    def _update(self, batches: Sequence[Batch]) -> None:
        found = batches
        limits = {p: (g["min_coeff"], g["max_coeff"]) for g in self.param_groups for p in g["params"]}
        default = (self.defaults["min_coeff"], self.defaults["max_coeff"])
        position = {p: i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        squares = [update.lamb_update(b) for b in found]
        params = [s.given.param for b in found for s in b.slots]
        order = sorted(range(len(params)), key=lambda i: position.get(params[i], i))
        local = _concatenate(squares)
        total = local
        if self.norm_reducer is not None:
            total = _arranged(self.norm_reducer([params[i] for i in order], _arranged(local, order)), _inverse(order))
        ratios = _trust_ratios(total, [limits.get(p, default) for p in params])
        at = 0
        for batch in found:
            mine = ratios[at : at + len(batch.slots)].to(batch.slots[0].param.device)
            at += len(batch.slots)
            update.lamb_apply(batch, (mine * _step_size(batch)).float())
        self._coefficients = [_arranged(ratios, order)]


def _step_size(batch: Batch) -> float | Tensor:
    """lr with the bias corrections; what lies on a device stays there, so that the host does not wait for it."""
    hyper = batch.hyper
    lr = hyper.lr.double() if isinstance(hyper.lr, Tensor) else hyper.lr
    if batch.guard is not None:
        if not hyper.bias_correction:
            return lr
        step = hyper.step - batch.guard.skipped
        beta1, beta2 = hyper.betas
        return lr * (1.0 - beta2**step).sqrt() / (1.0 - beta1**step)
    if isinstance(lr, Tensor):
        return lr * replace(hyper, lr=1.0, grad_scale=1.0).lowered(Algorithm.LAMB).step_size
    return replace(hyper, grad_scale=1.0).lowered(Algorithm.LAMB).step_size


def _concatenate(squares: list[Tensor]) -> Tensor:
    if not squares:
        return torch.zeros(0, 2, dtype=torch.float64)
    return torch.cat([s.to(squares[0].device) for s in squares])


def _arranged(rows: Tensor, order: list[int]) -> Tensor:
    """rows[order]; rows themselves when they are in order, so that no index travels to a device (which waits for
    it).
    """
    if order == list(range(len(order))):
        return rows
    return rows[torch.tensor(order, dtype=torch.long, device=rows.device)]


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _trust_ratios(squares: Tensor, limits: list[tuple[float, float]]) -> Tensor:
    """fp64 [n]: clip(|p| / |u|, min, max), 1 where either is 0."""
    norms = squares.sqrt()
    usable = (norms[:, 0] != 0) & (norms[:, 1] != 0)
    ratio = norms[:, 0] / torch.where(usable, norms[:, 1], torch.ones_like(norms[:, 1]))
    return torch.where(usable, _limited(ratio, limits), torch.ones_like(ratio))


def _limited(ratio: Tensor, limits: list[tuple[float, float]]) -> Tensor:
    if len(set(limits)) <= 1:  # one group: the limits stay numbers
        return ratio.clamp(*limits[0]) if limits else ratio
    low, high = (torch.tensor(side, dtype=torch.float64).to(ratio.device) for side in zip(*limits))
    return ratio.clamp(low, high)
