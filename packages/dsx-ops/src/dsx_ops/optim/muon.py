"""Muon: momentum, orthogonalised, for matrices; AdamW for everything else, in one optimizer.

For a matrix W with gradient g:

    m = mu * m + (1 - mu) * g                       momentum
    u = (1 - mu) * g + mu * m  (nesterov), or m
    W = (1 - lr * wd) * W - lr * sqrt(max(1, rows / columns)) * orthogonal(u)

`orthogonal(u)` is U V^T of the singular value decomposition of u, approximated by five Newton-Schulz steps of a quintic
polynomial with the coefficients (3.4445, -4.7750, 2.0315), which brings the singular values between 0.7 and 1.2 (Jordan
et al., 2024: "Muon: an optimizer for hidden layers"). Tensors of more dimensions are taken as matrices with the first
dimension as rows.

Which tensors are matrices to it is a setting of the parameter group (`use_muon`); groups without it are divided by
dimension: two or more are for Muon. Embeddings and heads belong to AdamW: give them a group with `use_muon` False.

The optimizer needs whole matrices (`needs_whole_tensors`). It leaves out one orthogonalisation per attention head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import HyperparameterError, TensorError

__all__ = ["Muon", "orthogonalize"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrix: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """U V^T of a matrix's singular value decomposition, by Newton-Schulz steps.

    Args:
        matrix: (rows, columns); more dimensions are a batch of matrices.
        steps: of the iteration.
        dtype: it computes in this; None: bfloat16 on CUDA, else float32.

    Returns:
        A new tensor of the same shape and dtype; singular values are between 0.7 and 1.2 after five steps.

    Raises:
        TensorError: it has less than two dimensions.
    """
    if matrix.dim() < 2:
        raise TensorError(f"orthogonalize: got shape {tuple(matrix.shape)}, expected two dimensions or more")
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype or (torch.bfloat16 if matrix.is_cuda else torch.float32))
    tall = matrix.shape[-2] > matrix.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, for matrices; AdamW for everything else, in one optimizer.

    Args:
        params: parameters, or groups of them. A group may have `use_muon` and any of the settings below.
        lr: of both rules, where `muon_lr` or `adam_lr` do not say otherwise.
        muon_lr, adam_lr: learning rates of the two rules.
        momentum: of Muon.
        nesterov: look ahead by one step of momentum.
        weight_decay: decoupled, in both rules.
        ns_steps: Newton-Schulz steps.
        betas, eps: of AdamW.

    Raises:
        HyperparameterError: a setting is out of its range.
        TensorError: a group for Muon has a tensor of less than two dimensions.
    """

    needs_whole_tensors = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        for name, value, top in (("momentum", momentum, 1), ("betas[0]", betas[0], 1), ("betas[1]", betas[1], 1)):
            if not 0 <= value < top:
                raise HyperparameterError(f"{name}: got {value}, expected at least 0 and less than {top}")
        for name, value in (("lr", lr), ("muon_lr", muon_lr), ("adam_lr", adam_lr), ("weight_decay", weight_decay)):
            if value is not None and not value >= 0:
                raise HyperparameterError(f"{name}: got {value}, expected at least 0")
        if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or ns_steps < 1:
            raise HyperparameterError(f"ns_steps: got {ns_steps!r}, expected a whole number of at least 1")
        rates = {True: lr if muon_lr is None else muon_lr, False: lr if adam_lr is None else adam_lr}
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "ns_steps": ns_steps,
            "betas": betas, "eps": eps, "use_muon": True,
        }  # fmt: skip
        super().__init__([found for group in _groups(params) for found in _divided(group, rates)], defaults)
        for group in self.param_groups:
            small = [tuple(p.shape) for p in group["params"] if group["use_muon"] and p.dim() < 2]
            if small:
                raise TensorError(
                    f"Muon: got a tensor of shape {small[0]} in a group with use_muon, expected matrices; give it a"
                    " group with use_muon=False"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = _muon if group["use_muon"] else _adamw
            for param in group["params"]:
                if param.grad is not None:
                    update(param, param.grad, self.state[param], group)
        return loss


def _groups(params: Any) -> list[dict[str, Any]]:
    found = list(params)
    return [dict(group) for group in found] if found and isinstance(found[0], dict) else [{"params": found}]


def _divided(group: dict[str, Any], rates: dict[bool, float]) -> list[dict[str, Any]]:
    """A group as one that says `use_muon`, or as two."""
    params = group["params"]
    params = [params] if isinstance(params, Tensor) else list(params)
    if "use_muon" in group:
        return [{"lr": rates[bool(group["use_muon"])], **group, "params": params}]
    parts = {use: [p for p in params if (p.dim() >= 2) == use] for use in (True, False)}
    return [{"lr": rates[use], **group, "params": some, "use_muon": use} for use, some in parts.items() if some]


def _muon(param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(grad)
    buffer, mu = state["momentum_buffer"], group["momentum"]
    buffer.lerp_(grad, 1 - mu)
    update = grad.lerp(buffer, mu) if group["nesterov"] else buffer
    rows = update.reshape(update.shape[0], -1)
    scale = math.sqrt(max(1.0, rows.shape[0] / max(1, rows.shape[1])))
    param.mul_(1 - group["lr"] * group["weight_decay"])
    param.add_(orthogonalize(rows, group["ns_steps"]).view_as(param), alpha=-group["lr"] * scale)


def _adamw(param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
    state["step"] += 1
    count, (beta1, beta2) = state["step"].item(), group["betas"]
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    param.mul_(1 - group["lr"] * group["weight_decay"])
    denominator = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
    param.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**count))
