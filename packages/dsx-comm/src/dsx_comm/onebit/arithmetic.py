"""The element-wise parts of the optimizers, on lists of tensors: moments, roots, directions.

m = b1 m + (1 - b1) g and v = b2 v + (1 - b2) g^2 as in Adam (arXiv:1412.6980); the direction is m / (sqrt(v) + eps)
plus decoupled weight decay. With `bias_correction`, m is divided by 1 - b1^t and v by 1 - b2^s: t steps, s of which
moved v (where b2 changes, by 1 less the product).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..buckets import in_buckets
from .schedule import EVERY_STEP_ALIKE, VarianceWindow

Tensors = list[torch.Tensor]
BATCH = 1 << 22  # elements whose temporaries exist at a time


@dataclass(frozen=True)
class Hyper:
    """The numbers of one parameter group in one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    eps_inside_sqrt: bool
    weight_decay: float
    m_correction: float = 1.0
    v_correction: float = 1.0

    @classmethod
    def of(
        cls, group: dict[str, Any], step: int, variance_steps: int, window: VarianceWindow = EVERY_STEP_ALIKE
    ) -> Hyper:
        """The values of a parameter group, at step `step` (counted from 1)."""
        beta1, beta2 = group["betas"]
        corrects = group["bias_correction"]
        return cls(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=window.beta2(beta2, step),
            eps=group["eps"],
            eps_inside_sqrt=group["eps_inside_sqrt"],
            weight_decay=group["weight_decay"],
            m_correction=1 - beta1**step if corrects else 1.0,
            v_correction=1 - window.rest(beta2, variance_steps) if corrects and variance_steps else 1.0,
        )


def batches(parameters: Sequence[torch.Tensor]) -> Iterator[Tensors]:
    """Consecutive parameters whose temporaries may exist together (see `BATCH`)."""
    return in_buckets(parameters, BATCH)


def move_first(m: Tensors, g: Tensors, beta1: float) -> None:
    """m = b1 m + (1 - b1) g."""
    torch._foreach_mul_(m, beta1)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_add_(m, g, alpha=1 - beta1)  # pyright: ignore[reportPrivateImportUsage]


def move_second(v: Tensors, g: Tensors, beta2: float) -> None:
    """v = b2 v + (1 - b2) g^2."""
    torch._foreach_mul_(v, beta2)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_addcmul_(v, g, g, value=1 - beta2)  # pyright: ignore[reportPrivateImportUsage]


def with_variance_floor(v: Tensors, floor: float) -> Tensors:
    """v, but no element below floor^2 of its tensor's mean: sqrt(v) is at least `floor` of its root mean square.

    Momenta that arrive in one bit carry noise of the size of their tensor's scale. Where v is far below that of the
    other elements (rare rows of an embedding), dividing by sqrt(v) makes steps of that noise; the floor bounds them.
    """
    return [x.clamp(min=x.mean() * floor**2) if x.numel() else x for x in v]


def roots(v: Tensors, h: Hyper) -> Tensors:
    """sqrt(v) + eps, or sqrt(v + eps); v corrected."""
    found = list(torch._foreach_div(v, h.v_correction))  # pyright: ignore[reportPrivateImportUsage]
    if h.eps_inside_sqrt:
        torch._foreach_add_(found, h.eps)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_sqrt_(found)  # pyright: ignore[reportPrivateImportUsage]
    else:
        torch._foreach_sqrt_(found)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(found, h.eps)  # pyright: ignore[reportPrivateImportUsage]
    return found


def directions(p: Tensors, m: Tensors, denominators: Tensors, h: Hyper) -> Tensors:
    """m / denominator + weight_decay p, m corrected; float32."""
    found = list(torch._foreach_div(m, denominators))  # pyright: ignore[reportPrivateImportUsage]
    if h.m_correction != 1.0:
        torch._foreach_div_(found, h.m_correction)  # pyright: ignore[reportPrivateImportUsage]
    if h.weight_decay:
        torch._foreach_add_(found, p, alpha=h.weight_decay)  # pyright: ignore[reportPrivateImportUsage]
    return found


def descend(p: Tensors, direction: Tensors, lr: float) -> None:
    """p = p - lr direction, in p's dtype."""
    torch._foreach_add_(p, direction, alpha=-lr)  # pyright: ignore[reportPrivateImportUsage]
