"""Batches of CUDA tensors: torch's own fused kernels where they compute the same rule, else the reference's operations.

No host synchronisation as long as `lr` and `grad_scale` are numbers (or, with the fused kernels, tensors on the
device). Gradients are never changed: with a `grad_scale` they are unscaled into temporaries, a bounded piece at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..spec import Algorithm, Batch, Slot

# Private names, but the ones torch.optim itself calls; present in every torch this package admits.
_functions: Any = torch._C._VariableFunctions  # pyright: ignore[reportAttributeAccessIssue]
PIECE_BYTES = 256 << 20  # temporaries for unscaled gradients


def fusable(batch: Batch) -> bool:
    """Whether torch has a fused kernel for exactly this rule and these dtypes."""
    h, first = batch.hyper, batch.slots[0]
    same = all(t.dtype == first.param.dtype for t in (first.grad, *first.states))
    plain = first.low_bits is None and same
    if batch.algorithm is Algorithm.ADAM:
        return plain and h.bias_correction
    return plain and batch.algorithm is Algorithm.SGD


def run(batch: Batch) -> None:
    """Apply the batch's update."""
    if not fusable(batch):
        reference.run(batch)
        return
    for slots in _groups(batch):
        grads = [s.grad for s in slots]
        scale = batch.hyper.grad_scale
        if isinstance(scale, Tensor) or scale != 1.0:
            grads = list(_functions._foreach_mul(grads, _reciprocal(scale, grads[0].device)))
        if batch.algorithm is Algorithm.ADAM:
            _adam(batch, slots, grads)
        else:
            _sgd(batch, slots, grads)
        for s in slots:
            if s.copy is not None:
                s.copy.copy_(s.param, non_blocking=True)


def _reciprocal(scale: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(scale, Tensor):
        return scale.to(device, non_blocking=True).reciprocal()
    return torch.full((), 1.0 / scale, device=device)


def _groups(batch: Batch) -> list[list[Slot]]:
    """Slots whose gradients together stay below the bound for temporaries."""
    groups: list[list[Slot]] = []
    size = PIECE_BYTES
    for slot in batch.slots:
        nbytes = slot.grad.numel() * slot.grad.element_size()
        if not groups or size + nbytes > PIECE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(slot)
        size += nbytes
    return groups


def _adam(batch: Batch, slots: list[Slot], grads: list[Tensor]) -> None:
    h = batch.hyper
    step = torch.full((), float(h.step), device=slots[0].param.device)
    fused = _functions._fused_adamw_ if h.decoupled else _functions._fused_adam_
    fused(
        [s.param.detach() for s in slots],
        grads,
        [s.states[0] for s in slots],
        [s.states[1] for s in slots],
        [],
        [step] * len(slots),
        lr=h.lr,
        beta1=h.betas[0],
        beta2=h.betas[1],
        weight_decay=h.weight_decay,
        eps=h.eps,
        amsgrad=False,
        maximize=h.maximize,
    )


def _sgd(batch: Batch, slots: list[Slot], grads: list[Tensor]) -> None:
    h = batch.hyper
    _functions._fused_sgd_(
        [s.param.detach() for s in slots],
        grads,
        [s.states[0] for s in slots] if h.momentum else [],
        weight_decay=h.weight_decay,
        momentum=h.betas[0],
        lr=h.lr,
        dampening=h.dampening,
        nesterov=h.nesterov,
        maximize=h.maximize,
        is_first_step=h.step == 1,
    )
