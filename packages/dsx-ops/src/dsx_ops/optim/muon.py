"""Muon: momentum, orthogonalised, for matrices; AdamW for everything else, in one optimizer.

For a matrix W with gradient g:

    m = mu * m + (1 - mu) * g                       momentum
    u = (1 - mu) * g + mu * m  (nesterov), or m
    W = (1 - lr * wd) * W - lr * scale * orthogonal(u)

`orthogonal(u)` is U V^T of the singular value decomposition of u (`orthogonal.py`). The published scales:

    original         sqrt(max(1, rows / columns))   Jordan et al., 2024
    match_rms_adamw  0.2 * sqrt(max(rows, columns)) Liu et al., 2025 ("Muon is scalable for LLM training"): AdamW's lr
    spectral         sqrt(max(rows, columns))       the same without the factor
    unit_rms_norm    sqrt(rows / columns)           Bernstein, 2025 ("Deriving Muon")

and rules of weight decay: `decoupled`, as above, and `cautious` (Chen et al., 2025): only elements that the update
makes smaller decay.

Which tensors, which matrices in them, and the step: `matrices.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import HyperparameterError, TensorError
from .matrices import MatrixOptimizer, check_rates, check_split
from .orthogonal import COEFFICIENTS, Coefficients, Method, coefficients_of_steps, newton_schulz, newton_schulz_work

__all__ = ["Muon", "orthogonalize"]

_SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
}
_METHODS, _DECAYS = ("standard", "gram"), ("decoupled", "cautious")


def orthogonalize(
    matrix: Tensor,
    steps: int = 5,
    dtype: torch.dtype | None = None,
    *,
    coefficients: Coefficients = COEFFICIENTS,
    eps: float = 1e-7,
    method: Method = "standard",
) -> Tensor:
    """U V^T of a matrix's singular value decomposition, by Newton-Schulz steps.

    Args:
        matrix: (rows, columns); more dimensions are several matrices.
        steps: of the iteration.
        dtype: it computes in this; None: bfloat16 on CUDA, else float32.
        coefficients: (a, b, c) of the polynomial, or one such triple per step.
        eps: least norm that the matrix is divided by.
        method: "standard", or "gram", which needs fewer operations where one side is much longer than the other.

    Returns:
        A new tensor of the same shape and dtype; singular values are between 0.7 and 1.2 after five steps.

    Raises:
        TensorError: it has less than two dimensions.
    """
    if matrix.dim() < 2:
        raise TensorError(f"orthogonalize: got shape {tuple(matrix.shape)}, expected two dimensions or more")
    if not matrix.numel():
        return matrix.clone()
    found = [
        newton_schulz(one, steps, dtype, coefficients=coefficients, eps=eps, method=method)
        for one in matrix.reshape(-1, *matrix.shape[-2:])
    ]
    return torch.stack(found).to(matrix.dtype).view(matrix.shape)


class Muon(MatrixOptimizer):
    """Momentum, orthogonalised, for matrices; AdamW for everything else, in one optimizer.

    Args:
        params: parameters, or groups of them. A group may have `use_muon` and any of the settings below.
        lr: of both rules, where `muon_lr` or `adam_lr` do not say otherwise.
        muon_lr, adam_lr: learning rates of the two rules.
        momentum: of Muon.
        nesterov: look ahead by one step of momentum.
        weight_decay: decoupled, in both rules.
        ns_steps, ns_coefficients, ns_eps: of the Newton-Schulz iteration; torch calls `ns_eps` eps.
        ns_method: "standard" or "gram".
        ns_dtype: it computes in this, and matrices of a sharded model travel in it; None: bfloat16 on CUDA, else
            float32. `torch.optim.Muon` always takes bfloat16.
        adjust_lr_fn: "original" (also None), "match_rms_adamw", "spectral" or "unit_rms_norm".
        decay: "decoupled" or "cautious", for the matrices.
        stacked, split_rows, split_columns: see `optim/matrices.py`.
        betas, eps: of AdamW.

    Raises:
        HyperparameterError: a setting is out of its range.
        TensorError: a group for Muon has a tensor of less than two dimensions, or one that cannot be split so.
    """

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
        ns_coefficients: Coefficients = COEFFICIENTS,
        ns_eps: float = 1e-7,
        ns_method: Method = "standard",
        ns_dtype: torch.dtype | str | None = None,
        adjust_lr_fn: str | None = None,
        decay: str = "decoupled",
        stacked: bool | None = None,
        split_rows: int | Sequence[int] = 1,
        split_columns: int = 1,
    ) -> None:
        for name, value in (("lr", lr), ("muon_lr", muon_lr), ("adam_lr", adam_lr)):
            if value is not None and not value >= 0:
                raise HyperparameterError(f"{name}: got {value}, expected at least 0")
        rates = {True: lr if muon_lr is None else muon_lr, False: lr if adam_lr is None else adam_lr}
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "ns_steps": ns_steps,
            "betas": betas, "eps": eps, "use_muon": True, "ns_coefficients": ns_coefficients, "ns_eps": ns_eps,
            "ns_method": ns_method, "ns_dtype": _dtype_of(ns_dtype), "adjust_lr_fn": adjust_lr_fn, "decay": decay,
            "stacked": stacked, "split_rows": split_rows, "split_columns": split_columns,
        }  # fmt: skip
        super().__init__(params, defaults, rates)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As any optimizer's. Raises HyperparameterError and TensorError as the constructor does."""
        if "ns_dtype" in param_group:
            param_group = {**param_group, "ns_dtype": _dtype_of(param_group["ns_dtype"])}
        super().add_param_group(param_group)

    # The parts of the rule --------------------------------------------------------------------------------------------

    def message_dtype(self, group: Mapping[str, Any], device: torch.device) -> torch.dtype:
        """The dtype of directions and updates, where matrices are computed on `device`."""
        return group["ns_dtype"] or (torch.bfloat16 if device.type == "cuda" else torch.float32)

    def direction(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Update the momentum of these elements; what is orthogonalised, in the dtype of `grad`. Not to be written."""
        state, mu = self.state[param], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - mu)
        return grad.lerp(buffer, mu) if group["nesterov"] else buffer

    def of_matrix(self, matrix: Tensor, group: Mapping[str, Any], states: Mapping[str, Tensor] | None = None) -> Tensor:
        """The update of a whole matrix (rows, columns) before it is scaled, in the dtype it was computed in."""
        parts = matrix.chunk(group["split_columns"], dim=1)
        found = [
            newton_schulz(
                part,
                group["ns_steps"],
                self.message_dtype(group, matrix.device),
                coefficients=group["ns_coefficients"],
                eps=group["ns_eps"],
                method=group["ns_method"],
            )
            for part in parts
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def apply(self, param: Tensor, update: Tensor, matrix: tuple[int, int], group: Mapping[str, Any]) -> None:
        """Change elements of a matrix of this shape by its update."""
        lr, decay = group["lr"], group["lr"] * group["weight_decay"]
        scale = _SCALES[group["adjust_lr_fn"] or "original"](matrix[0], matrix[1] // group["split_columns"])
        if group["decay"] == "cautious":
            param.addcmul_(param, (param * update > 0).to(param.dtype), value=-decay)
        else:
            param.mul_(1 - decay)
        param.add_(update, alpha=-lr * scale)

    def work(self, matrix: tuple[int, int], group: Mapping[str, Any]) -> float:
        """Floating-point operations of `of_matrix`."""
        parts = group["split_columns"]
        return parts * newton_schulz_work(matrix[0], matrix[1] // parts, group["ns_steps"], group["ns_method"])

    def check_settings(self, group: Mapping[str, Any]) -> None:
        """Raise HyperparameterError if a setting of a group is out of its range."""
        check_rates(group, "ns_eps")
        check_split(group, "ns_steps", "split_columns")
        choices = {"ns_method": _METHODS, "decay": _DECAYS, "adjust_lr_fn": (None, *_SCALES)}
        for name, allowed in choices.items():
            if group[name] not in allowed:
                raise HyperparameterError(
                    f"{name}: got {group[name]!r}, expected one of {', '.join(map(str, allowed))}"
                )
        try:
            coefficients_of_steps(group["ns_coefficients"], group["ns_steps"])
        except (TypeError, ValueError) as error:
            raise HyperparameterError(f"ns_coefficients: got {group['ns_coefficients']!r}, {error}") from error


def _dtype_of(dtype: Any) -> torch.dtype | None:
    """A dtype, given as such or by its name in torch, as configurations do."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    raise HyperparameterError(f"ns_dtype: got {dtype!r}, expected a floating-point dtype, such as torch.bfloat16")
