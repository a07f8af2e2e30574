"""Descriptions of updates: an algorithm, its numbers, and the tensors it goes over. No arithmetic on tensors.

`Hyper` holds the numbers as the user gives them; `Hyper.lowered()` turns them into the factors that the kernels and the
PyTorch reference both multiply with, computed once in fp64, so that the two agree to the bit.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .errors import HyperparameterError, TensorError
from .layouts import WorkingCopy

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Algorithm(enum.IntEnum):
    """Update rules; the numbers are those of the native code. Those from 16 on have none: `low_bit` serves them."""

    ADAM = 0
    ADAGRAD = 1
    LION = 2
    SGD = 3
    ADAM8 = 4
    LAMB = 5
    ADAM4 = 16
    ADAM_ROUNDED = 17


BLOCKS = {Algorithm.ADAM8: 256, Algorithm.ADAM4: 128}
"""Elements per scale of coded states; that of 8 bits as in native/include/dsx_ops/kernels.h."""
BITS = {Algorithm.ADAM8: 8, Algorithm.ADAM4: 4}
"""Of a coded moment."""
_ADAMS = (Algorithm.ADAM, Algorithm.ADAM8, Algorithm.ADAM4, Algorithm.ADAM_ROUNDED)


@dataclass(frozen=True)
class Lowered:
    """The factors of one update; see `native/cpu/optimizers.cpp` for where each stands. Those that follow from the
    learning rate or the scale of gradients may be fp64 tensors on the device (`Hyper.lowered`).
    """

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    decay: float | Tensor
    l2: float
    step_size: float | Tensor
    inv_denom: float
    grad_mul: float | Tensor
    damp: float
    unscale: bool
    use_l2: bool
    decoupled: bool
    momentum: bool
    nesterov: bool
    eps_inside: bool
    maximize: bool
    seed: int

    def numbers(self) -> list[Any]:
        """In the order of the native `Hyper`, which takes numbers on the host."""
        return [
            self.beta1, self.one_minus_beta1, self.beta2, self.one_minus_beta2, self.eps, self.decay,
            self.l2, self.step_size, self.inv_denom, self.grad_mul, self.damp,
        ]  # fmt: skip

    def flags(self) -> int:
        """As the native `Flag`s."""
        bits = (self.unscale, self.use_l2, self.decoupled, self.momentum, self.nesterov, self.eps_inside, self.maximize)
        return sum(1 << i for i, on in enumerate(bits) if on)


@dataclass(frozen=True)
class Hyper:
    """The numbers of one update, as the user gives them.

    `step` counts from 1. `decoupled`: weight decay multiplies the parameter (AdamW, Lion) instead of entering the
    gradient. `grad_scale`: gradients are multiplied by its fp32 reciprocal before anything else.
    """

    lr: float | Tensor
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    weight_decay: float = 0.0
    step: int = 1
    decoupled: bool = False
    bias_correction: bool = True
    momentum: bool = False
    nesterov: bool = False
    dampening: float = 0.0
    eps_inside: bool = False
    maximize: bool = False
    grad_scale: float | Tensor = 1.0
    seed: int = 0

    def check_reversible(self) -> None:
        """Raise `HyperparameterError` when a step of Adam with these numbers keeps nothing of what was before it."""
        if self.step < 1:
            raise HyperparameterError(f"rollback: got a state of {self.step} steps, expected at least one to undo")
        decay = self.lowered(Algorithm.ADAM).decay if self.decoupled else 1.0
        factors = (("betas[0]", self.betas[0]), ("betas[1]", self.betas[1]), ("1 - lr * weight_decay", decay))
        for name, value in factors:
            if value == 0.0:
                raise HyperparameterError(
                    f"rollback: got {name} = 0, expected another number: such a step keeps nothing of what was"
                    " before it"
                )

    def lowered(self, algorithm: Algorithm, *, on_device: bool = False) -> Lowered:
        """The factors; formulas of DeepSpeed's fused optimizers and of torch.optim. `on_device`: what follows from
        tensors on a device stays there, so that the host does not wait for them; torch's operations take that.
        """
        lr, (beta1, beta2), wd = _number(self.lr, on_device), self.betas, self.weight_decay
        step_size, inv_denom, damp = lr, 1.0, 1.0
        if algorithm in _ADAMS and self.bias_correction:
            step_size = lr / (1.0 - beta1**self.step)
            inv_denom = 1.0 / math.sqrt(1.0 - beta2**self.step)
        if algorithm is Algorithm.LAMB and self.bias_correction:
            step_size = lr * math.sqrt(1.0 - beta2**self.step) / (1.0 - beta1**self.step)
        if algorithm is Algorithm.SGD and self.momentum and self.step > 1:
            damp = 1.0 - self.dampening
        first_momentum = algorithm is Algorithm.SGD and self.step == 1
        scale = _number(self.grad_scale, on_device)
        there = isinstance(scale, Tensor)
        return Lowered(
            beta1=0.0 if first_momentum else beta1,
            one_minus_beta1=1.0 - beta1,
            beta2=beta1 if algorithm is Algorithm.SGD else beta2,
            one_minus_beta2=1.0 - beta2,
            eps=self.eps,
            decay=1.0 - lr * wd,
            l2=wd,
            step_size=step_size,
            inv_denom=inv_denom,
            grad_mul=1.0 / scale if there or scale != 0 else math.inf,  # a tensor of 0 has this reciprocal
            damp=damp,
            unscale=there or scale != 1.0,
            use_l2=wd != 0.0 and not self.decoupled,
            decoupled=wd != 0.0 and self.decoupled,
            momentum=self.momentum,
            nesterov=self.nesterov,
            eps_inside=self.eps_inside,
            maximize=self.maximize,
            seed=self.seed & 0xFFFFFFFF,
        )


def _number(value: float | Tensor, on_device: bool) -> float | Tensor:
    if on_device and isinstance(value, Tensor) and value.device.type != "cpu":
        return value.detach().reshape(()).double()
    return float(value)


@dataclass
class Slot:
    """One tensor of an update, with everything that belongs to it, all of the same numel.

    Kernels take slots whose tensors are dense and lie in memory in one order (`optim.slots.working_slot`).

    `low_bits`: int16, completes a bf16 `param` to its fp32 master. `copy`: receives the new parameter in its own dtype.
    `scales`: one fp32 per block and moment, for coded states. `offset`: index of the first element in the whole
    buffer, which keys stochastic rounding. `owner`: the slot that this one was made from, of distributed tensors or of
    tensors in another order. `copies`: what to put back there when the update is done.
    """

    param: Tensor
    grad: Tensor
    states: tuple[Tensor, ...] = ()
    low_bits: Tensor | None = None
    copy: Tensor | None = None
    scales: tuple[Tensor, ...] = ()
    offset: int = 0
    name: str = "parameter"
    owner: Slot | None = None
    copies: tuple[WorkingCopy, ...] = ()

    @property
    def given(self) -> Slot:
        """The slot with the tensors that the optimizer was given."""
        return self if self.owner is None else self.owner.given

    def kind(self) -> tuple:
        """The properties that slots must share to go into one call."""
        state = self.states[0].dtype if self.states else torch.float32
        copy = self.copy.dtype if self.copy is not None else None
        return (self.param.device, self.param.dtype, self.grad.dtype, state, copy, self.low_bits is not None)


@dataclass(frozen=True)
class Guard:
    """Whether an update happens is known on the device only.

    `found_inf`: fp32, one number; not 0 = everything stays. `skipped`: fp64, how many of the counted steps did not
    happen.
    """

    found_inf: Tensor
    skipped: Tensor


@dataclass
class Batch:
    """Slots of one kind with the same numbers: one call of a kernel. `group`: the parameter group the numbers come
    from.
    """

    algorithm: Algorithm
    hyper: Hyper
    slots: list[Slot] = field(default_factory=list)
    guard: Guard | None = None
    group: int = 0

    @property
    def numel(self) -> int:
        """Elements of all slots."""
        return sum(s.param.numel() for s in self.slots)


def check_slot(slot: Slot, algorithm: Algorithm) -> None:
    """Raise `TensorError` unless every tensor of the slot fits; called for all slots before anything is written."""
    param = slot.param
    _check(param, "parameter", slot.name, FLOATS, param)
    if slot.grad.layout is torch.sparse_coo and algorithm is Algorithm.ADAGRAD:
        _check_sparse(slot)
    elif slot.grad.layout is not torch.strided:
        raise TensorError(
            f"{slot.name}: got a {str(slot.grad.layout).removeprefix('torch.')} gradient, expected a dense one; "
            "use sparse=False in the embedding, CPUAdagrad (sparse_coo), or torch.optim.SparseAdam"
        )
    else:
        _check(slot.grad, "gradient", slot.name, FLOATS, param)
    block = BLOCKS.get(algorithm, 0)
    if block and slot.offset % block:
        raise TensorError(
            f"{slot.name}: got offset {slot.offset}, expected a multiple of {block} for {BITS[algorithm]}-bit states"
        )
    for state in slot.states:
        _check(state, "optimizer state", slot.name, (torch.uint8,) if block else FLOATS, param)
    for scale in slot.scales:
        blocks = -(-param.numel() // block)
        if scale.dtype != torch.float32 or scale.numel() != blocks or not scale.is_contiguous():
            raise TensorError(f"{slot.name}: got {scale.numel()} {scale.dtype} block scales, expected {blocks} float32")
    if slot.low_bits is not None:
        _check(slot.low_bits, "low bits", slot.name, (torch.int16,), param)
        if param.dtype != torch.bfloat16:
            raise TensorError(f"{slot.name}: got low bits for a {param.dtype} parameter, expected bfloat16")
    if slot.copy is not None:
        _check(slot.copy, "copy", slot.name, FLOATS, param)


def name_of(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _check(tensor: Tensor, role: str, name: str, dtypes: Sequence[torch.dtype], param: Tensor) -> None:
    if (
        tensor.dtype in dtypes
        and tensor.numel() == param.numel()
        and tensor.device == param.device
        and tensor.layout is torch.strided
    ):
        return
    if tensor.layout is not torch.strided:
        raise TensorError(f"{name}: got a {tensor.layout} tensor as {role}, expected a dense one; pass .to_dense()")
    if tensor.dtype not in dtypes:
        wanted = ", ".join(map(name_of, dtypes))
        raise TensorError(f"{name}: got a {name_of(tensor.dtype)} {role}, expected {wanted}")
    if tensor.device != param.device:
        raise TensorError(f"{name}: the {role} is on {tensor.device}, expected {param.device} where the parameter is")
    raise TensorError(f"{name}: got a {role} of {tensor.numel()} elements, expected {param.numel()}")


def _check_sparse(slot: Slot) -> None:
    grad, param = slot.grad, slot.param
    if grad.dtype not in FLOATS or grad.device != param.device or grad.shape != param.shape:
        raise TensorError(
            f"{slot.name}: got a sparse gradient {name_of(grad.dtype)} {tuple(grad.shape)} on {grad.device}, expected "
            f"float32, bfloat16 or float16 of shape {tuple(param.shape)} on {param.device}"
        )
