"""Norms, clipping and checks of gradients under the names scripts know, over the one-pass kernels of `update`.

These see one process. A norm over model-parallel ranks needs collectives, which this package has not: take the local
`squared_norms`, add them up over the ranks, and scale; the dsx engine does so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .errors import HyperparameterError
from .layouts import readable
from .update import clip_, clip_coefficient, scale_, squared_norms


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, mpu: object | None = None
) -> Tensor:
    """Scale gradients so that their global norm is at most `max_norm`; returns the norm before (fp64, no dimension).

    Coefficient min(1, max_norm / (norm + 1e-6)). `norm_type`: 2, infinity, or any p > 0. Parameters without gradients
    are passed over. Raises `HyperparameterError` for a negative `max_norm`, and for an `mpu` (see the module's text).
    """
    if not max_norm >= 0:
        raise HyperparameterError(f"max_norm: got {max_norm}, expected a number >= 0")
    grads = _grads(parameters)
    if float(norm_type) == 2.0:
        _refuse(mpu)
        return clip_(grads, max_norm)
    total = _norm(grads, norm_type, mpu)
    coefficient = clip_coefficient(float(total), max_norm)
    if coefficient < 1.0:
        scale_(grads, coefficient)
    return total


def get_weight_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0, mpu: object | None = None) -> Tensor:
    """The norm of all parameters of this process as one vector: a float64 tensor without dimensions. `norm_type`: 2.0,
    or infinity for the largest magnitude; `mpu` is refused, because nothing here communicates.
    """
    found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return _norm([p.detach() for p in found], norm_type, mpu)


def get_global_norm(norm_list: Iterable[float | Tensor]) -> float:
    """The 2-norm of a vector of which `norm_list` has the 2-norms of the parts."""
    return math.sqrt(math.fsum(float(n) ** 2 for n in norm_list))


def get_grad_zeros(parameters: Tensor | Iterable[Tensor], mpu: object | None = None) -> int:
    """The number of gradient elements that are exactly 0."""
    _refuse(mpu)
    return sum(g.numel() - int(torch.count_nonzero(readable(g))) for g in _grads(parameters))


class CheckOverflow:
    """Whether gradients hold an infinity or a NaN: one pass, no temporaries."""

    def __init__(self, param_groups: Iterable[Iterable[Tensor]] | None = None, mpu: object | None = None) -> None:
        _refuse(mpu)
        self.params = [p for group in param_groups or () for p in group]

    def check(self, param_groups: Iterable[Iterable[Tensor]] | None = None) -> bool:
        """True when a gradient of the given groups (else of the constructor's) is not finite."""
        return self.has_overflow(self.params if param_groups is None else [p for g in param_groups for p in g])

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """True when a gradient is not finite."""
        return not bool(squared_norms(_grads(params)).sum().isfinite())


def _grads(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    found = [parameters] if isinstance(parameters, Tensor) else parameters
    return [p.grad for p in found if p.grad is not None]


def _refuse(mpu: object | None) -> None:
    if mpu is not None:
        raise HyperparameterError(
            f"mpu: got {type(mpu).__name__}, expected None: this package has no collectives; "
            "add squared_norms() up over the model-parallel ranks, or let the engine clip, which its configuration says"
        )


def _norm(tensors: list[Tensor], norm_type: float, mpu: object | None) -> Tensor:
    _refuse(mpu)
    p = float(norm_type)
    if not p > 0:
        raise HyperparameterError(f"norm_type: got {norm_type}, expected 2, infinity or a number > 0")
    if p == 2.0:
        return squared_norms(tensors).sum().sqrt()
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    parts = torch.stack([torch.linalg.vector_norm(readable(t).double(), p).to(tensors[0].device) for t in tensors])
    return parts.amax() if math.isinf(p) else torch.linalg.vector_norm(parts, p)
