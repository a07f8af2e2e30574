"""The functions that `CPUAdamBuilder().load()` returns beside the classes: Adam by the raw functions that scripts call.

An optimizer is a number that the caller chooses; it says only whether weight decay is AdamW's, since all other numbers
come with each call.
"""

from __future__ import annotations

import torch
from dsx_ops import reference, update
from dsx_ops.errors import HyperparameterError
from dsx_ops.layouts import put_back
from dsx_ops.optim.slots import working_slot
from dsx_ops.spec import Algorithm, Batch, Hyper, Slot, check_slot
from torch import Tensor


class CPUAdamHandle:
    """One namespace of optimizers by number, as each `load()` gives."""

    def __init__(self) -> None:
        self._adamw: dict[int, bool] = {}

    def create_adam(
        self,
        optimizer_id: int,
        alpha: float = 1e-3,
        betta1: float = 0.9,
        betta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        should_log: bool = False,
    ) -> int:
        """Make optimizer `optimizer_id`; returns 0. The numbers count in each call, so that they are not kept here."""
        self._adamw[optimizer_id] = adamw_mode
        return 0

    def destroy_adam(self, optimizer_id: int) -> int:
        """Forget it; returns 0."""
        self._adamw.pop(optimizer_id, None)
        return 0

    @torch.no_grad()
    def adam_update(
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        bias_correction: bool,
        params: Tensor,
        grads: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
    ) -> int:
        """Step number `step` (from 1) of one buffer, in place; returns 0. Raises `TensorError` before anything is
        written.
        """
        hyper = self._hyper(optimizer_id, step, lr, (beta1, beta2), epsilon, weight_decay, bias_correction)
        slot = _slot(params, grads, exp_avg, exp_avg_sq)
        update.apply(Batch(Algorithm.ADAM, hyper, [slot]))
        put_back(slot.copies)
        return 0

    @torch.no_grad()
    def adam_rollback(
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        bias_correction: bool,
        params: Tensor,
        grads: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
    ) -> int:
        """Undo step number `step`, to rounding: the reverse of `adam_update` with the same arguments. Raises
        `HyperparameterError`.
        """
        hyper = self._hyper(optimizer_id, step, lr, (beta1, beta2), epsilon, weight_decay, bias_correction)
        hyper.check_reversible()
        slot = _slot(params, grads, exp_avg, exp_avg_sq)
        reference.adam_rollback(slot, hyper.lowered(Algorithm.ADAM))
        put_back(slot.copies)
        return 0

    def _hyper(
        self,
        number: int,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        bias_correction: bool,
    ) -> Hyper:
        if number not in self._adamw:
            raise HyperparameterError(f"optimizer_id: got {number}, expected one that create_adam was called with")
        if step < 1:
            raise HyperparameterError(f"step: got {step}, expected a number counted from 1")
        return Hyper(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            decoupled=self._adamw[number],
            bias_correction=bias_correction,
        )


def _slot(params: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Slot:
    slot = Slot(params, grads, (exp_avg, exp_avg_sq), name="params")
    check_slot(slot, Algorithm.ADAM)
    return working_slot(slot, row_major=False)
