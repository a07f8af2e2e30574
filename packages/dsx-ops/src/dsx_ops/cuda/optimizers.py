"""Updates of CUDA tensors: one launch per 128 tensors, the bits of the CPU kernels, no waiting for the device.

`lr` and `grad_scale` may be tensors on the device: a one-thread kernel then computes the factors there first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..spec import Batch, Lowered
from ..tables import addresses, update_dtypes, update_table, wrote_slots
from . import launch

LAMB_UPDATE, LAMB_APPLY = 5, 6  # native/include/dsx_ops/kernels.h


class Factors:
    """The numbers of a batch as the module takes them, on the host or on the device."""

    def __init__(self, module: Any, batch: Batch) -> None:
        hyper, guard, device = batch.hyper, batch.guard, batch.slots[0].param.device
        self.device: Tensor | None = None
        on_device = [launch.lies_on(v, device) for v in (hyper.lr, hyper.grad_scale)]
        if guard is None and not any(on_device):
            self.host = hyper.lowered(batch.algorithm)
            return
        found_inf, step = (0.0, float(hyper.step)) if guard is None else (guard.found_inf, hyper.step - guard.skipped)
        known = replace(
            hyper,
            lr=0.0 if on_device[0] else float(hyper.lr),
            grad_scale=1.0 if on_device[1] else float(hyper.grad_scale),
        )
        self.host = known.lowered(batch.algorithm)
        self.device = torch.empty(module.HYPER_BYTES, dtype=torch.uint8, device=device)
        scalars = (hyper.lr, hyper.grad_scale, found_inf, step)
        module.prepare(
            launch.place(self.device),
            int(batch.algorithm),
            self.host.numbers(),
            self.host.flags(),
            self.host.seed,
            [launch.scalar(s, device) for s in scalars],
            [hyper.betas[0], hyper.betas[1], hyper.weight_decay],
            hyper.bias_correction,
            self.device.data_ptr(),
        )

    def arguments(self) -> tuple[list[float], int, int]:
        """Numbers, flags and seed."""
        h: Lowered = self.host
        return h.numbers(), h.flags(), h.seed


def run(module: Any, batch: Batch) -> None:
    """Apply the batch's update. Not for Lamb."""
    _start(module, batch, int(batch.algorithm), Factors(module, batch))
    wrote_slots(batch.slots)


def _start(
    module: Any,
    batch: Batch,
    algorithm: int,
    factors: Factors,
    squares: Tensor | None = None,
    partials: Tensor | None = None,
    coefficients: Tensor | None = None,
) -> None:
    extra = addresses(factors.device, squares, partials, coefficients)
    place = launch.place(batch.slots[0].param)
    module.step(place, algorithm, update_table(batch), update_dtypes(batch), *factors.arguments(), extra)


def lamb_update(module: Any, batch: Batch) -> Tensor:
    """Phase 1 of Lamb: moments. Returns fp64 [slots, 2] on the device: |p|^2 and |u|^2."""
    device = batch.slots[0].param.device
    squares = torch.zeros(len(batch.slots), 2, dtype=torch.float64, device=device)
    chunks = sum(module.chunks_of(s.param.numel()) for s in batch.slots)
    partials = torch.empty(2 * chunks, dtype=torch.float64, device=device)
    _start(module, batch, LAMB_UPDATE, Factors(module, batch), squares, partials)
    wrote_slots(batch.slots, params=False)
    return squares


def lamb_apply(module: Any, batch: Batch, coefficients: Tensor) -> None:
    """Phase 2 of Lamb; `coefficients` fp32 [slots] on the device."""
    known = replace(batch.hyper, lr=0.0, grad_scale=1.0)  # only eps, weight decay and flags count here
    _start(
        module,
        replace(batch, hyper=known),
        LAMB_APPLY,
        Factors(module, replace(batch, hyper=known)),
        coefficients=coefficients.contiguous(),
    )
    wrote_slots(batch.slots, states=False)
