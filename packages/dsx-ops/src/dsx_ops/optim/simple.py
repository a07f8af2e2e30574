"""Adagrad, Lion and SGD in one pass each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import HyperparameterError, TensorError
from ..spec import Algorithm, Batch, Hyper, Slot
from ._base import CopyOut, FusedOptimizer, Offsets


def _state_dtype(fp32: bool) -> torch.dtype | None:
    return torch.float32 if fp32 else None


class CPUAdagrad(FusedOptimizer):
    """Adagrad: sum += g^2;  p -= lr * g / (sqrt(sum) + eps), with wd*p added to g in both places.

    As torch.optim.Adagrad without lr_decay; state dicts exchange with it. Gradients are left as they are. Of a sparse
    gradient (sparse_coo, as torch.nn.Embedding(sparse=True) makes) the elements that it names are updated; weight decay
    is refused with it, as by torch.

    Args:
        model_params: parameters in host memory (float32, bfloat16, float16), or groups of them.
        lr, eps, weight_decay: as in torch.optim.Adagrad.
        amsgrad: refused if True.
        fp32_optimizer_states: `sum` in float32 (4 bytes per parameter); False: in the parameter's dtype.
        initial_accumulator_value: what `sum` begins with, at least 0.
        maximize: go up the gradient.

    Raises:
        HyperparameterError: a number out of its range.
    """

    algorithm = Algorithm.ADAGRAD
    state_names = ("sum",)

    def __init__(
        self,
        model_params: Any,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        initial_accumulator_value: float = 0.0,
        maximize: bool = False,
    ) -> None:
        if not initial_accumulator_value >= 0:
            raise HyperparameterError(f"initial_accumulator_value: got {initial_accumulator_value}, expected >= 0")
        super().__init__(
            model_params,
            {
                "lr": lr,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "initial_accumulator_value": initial_accumulator_value,
                "lr_decay": 0.0,  # torch.optim.Adagrad reads it from our state dicts
                "state_dtype": _state_dtype(fp32_optimizer_states),
            },
        )

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = super()._new_state(param, group)
        state["sum"].fill_(group["initial_accumulator_value"])
        return state

    def _checked(self, slot: Slot, group: dict[str, Any]) -> Slot:
        if slot.grad.layout is torch.sparse_coo and group["weight_decay"] != 0:
            raise HyperparameterError(
                f"{slot.name}: got a sparse gradient and weight_decay {group['weight_decay']}, expected 0: the decay of"
                " rows that the gradient does not name would be left out; put such parameters into a group with"
                " weight_decay=0"
            )
        return super()._checked(slot, group)

    def _hyper(self, group: dict[str, Any], step: int, grad_scale: float | Tensor) -> Hyper:
        if group.get("lr_decay"):
            raise HyperparameterError(f"lr_decay: got {group['lr_decay']}, expected 0; use a scheduler instead")
        return Hyper(
            lr=group["lr"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            maximize=group["maximize"],
            grad_scale=grad_scale,
        )


class FusedLion(FusedOptimizer):
    """Lion: c = b1 m + (1-b1) g;  p = p (1 - lr wd) - lr sign(c);  m = b2 m + (1-b2) g.

    The moment is in the parameter's dtype, or in `state_dtype`.

    Args:
        params: parameters (float32, bfloat16, float16), or groups of them.
        lr: about a tenth of what Adam takes, because every element moves by it.
        betas: (b1, b2).
        weight_decay: wd, decoupled.
        maximize: go up the gradient.
        state_dtype: dtype of the moment.

    Raises:
        HyperparameterError: a number out of its range.
    """

    algorithm = Algorithm.LION
    state_names = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "weight_decay": weight_decay,
                "maximize": maximize,
                "state_dtype": state_dtype,
            },
        )

    def _hyper(self, group: dict[str, Any], step: int, grad_scale: float | Tensor) -> Hyper:
        return Hyper(
            lr=group["lr"],
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            weight_decay=group["weight_decay"],
            step=step,
            decoupled=True,
            maximize=group["maximize"],
            grad_scale=grad_scale,
        )

    def _unsaid_step(self, state: dict[str, Any], group: dict[str, Any]) -> int:
        return 0  # the rule does not depend on it, and other implementations do not count


class CPULion(FusedLion):
    """Lion for parameters in host memory: the moment in fp32 unless `fp32_optimizer_states=False`. `model_params`,
    `lr`, `betas`, `weight_decay` and errors as in `FusedLion`.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay, state_dtype=_state_dtype(fp32_optimizer_states))


class SGD(FusedOptimizer):
    """SGD with momentum, dampening and Nesterov, as torch.optim.SGD (state `momentum_buffer`; none without
    momentum).

    Args:
        params: parameters (float32, bfloat16, float16), or groups of them.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.
        state_dtype: dtype of `momentum_buffer`; None: the parameter's.

    Raises:
        HyperparameterError: a number out of its range, or `nesterov` without momentum.
    """

    algorithm = Algorithm.SGD
    state_names = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise HyperparameterError(
                f"nesterov: got momentum {momentum} and dampening {dampening}, expected momentum > 0 and dampening 0"
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
                "state_dtype": state_dtype,
            },
        )

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return super()._new_state(param, group) if group["momentum"] else {"step": 0}

    def _hyper(self, group: dict[str, Any], step: int, grad_scale: float | Tensor) -> Hyper:
        return Hyper(
            lr=group["lr"],
            betas=(float(group["momentum"]), 0.0),
            weight_decay=group["weight_decay"],
            step=step,
            momentum=group["momentum"] != 0,
            nesterov=group["nesterov"],
            dampening=group["dampening"],
            maximize=group["maximize"],
            grad_scale=grad_scale,
        )

    def _collect(
        self, scale: float | Tensor, copy_out: CopyOut, offsets: Offsets
    ) -> tuple[list[Batch], list[dict[str, Any]]]:
        begun = self._begin_momentum()
        try:
            return super()._collect(scale, copy_out, offsets)
        except (TensorError, HyperparameterError):
            for state, step in begun:
                del state["momentum_buffer"]
                state["step"] = step
            raise

    def _begin_momentum(self) -> list[tuple[dict[str, Any], int]]:
        """Buffers of parameters whose group has momentum only since steps without it; returns their states and old
        counts.

        A buffer begins as the first gradient that it sees, so `step` counts from there: of SGD's numbers only that one
        depends on it.
        """
        begun: list[tuple[dict[str, Any], int]] = []
        for group in self.param_groups:
            for param in group["params"] if group["momentum"] else ():
                state = self.state[param] if param.grad is not None and param in self.state else {}
                if state and "momentum_buffer" not in state:
                    self._skips.settle()  # a skipped step must not be taken off the new count
                    begun.append((state, state["step"]))
                    state.update(self._new_state(param, group))
        return begun

    def _unsaid_step(self, state: dict[str, Any], group: dict[str, Any]) -> int:
        # torch's SGD counts no steps: a buffer means that the first step is over.
        if state.get("momentum_buffer", 0) is None:
            del state["momentum_buffer"]
        return 1 if "momentum_buffer" in state else 0
