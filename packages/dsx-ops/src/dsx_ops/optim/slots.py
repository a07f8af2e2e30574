"""The tensors that kernels take in place of those of an optimizer: this rank's parts, in one order of memory.

Parameters that are DTensors, as FSDP2 and tensor parallelism make them: this rank's shard is what gets updated.

An elementwise rule gives the same numbers shard by shard, so that nothing is communicated. States are DTensors like
their parameter, which is what distributed checkpoints can cut again for another number of ranks. Rules that need whole
tensors (Lamb's norms, scales per block of 8-bit states) refuse. Other tensor subclasses without memory of their own are
refused here too: a kernel would be given no address.

Slots whose tensors lie in memory in different orders, or whose gradient is sparse: working copies stand in for them.

Dense tensors of equal strides (channels_last, transposed) need none. The order is the parameter's where that is dense,
else row-major.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import TensorError
from ..layouts import WorkingCopy, is_dense, may_overlap, same_order
from ..spec import Slot

_PLAIN = (Tensor, Parameter)


def local_slot(slot: Slot, elementwise: bool) -> Slot:
    """The slot with this rank's parts in place of DTensors. Raises `TensorError`."""
    tensors = (slot.param, slot.grad)
    if type(tensors[0]) in _PLAIN and type(tensors[1]) in _PLAIN:
        return slot
    if not any(map(is_distributed, tensors)):
        for tensor in tensors:
            _refuse_wrapper(tensor, slot.name)
        return slot
    if not all(map(is_distributed, tensors)) or _layout(slot.param) != _layout(slot.grad):
        raise TensorError(
            f"{slot.name}: got a parameter as {_said(slot.param)} and a gradient as {_said(slot.grad)}, expected the"
            " same mesh and placements"
        )
    if not elementwise:
        raise TensorError(
            f"{slot.name}: got a DTensor, expected a whole tensor: this optimizer needs norms or scales of whole"
            " tensors; use FusedAdam or FusedLion with FSDP2, or dsx-zero, which reduces the norms"
        )
    return replace(
        slot,
        param=_local(slot.param),
        grad=_local(slot.grad),
        states=tuple(map(_local, slot.states)),
        low_bits=None if slot.low_bits is None else _local(slot.low_bits),
        copy=None if slot.copy is None else _local(slot.copy),
        owner=slot,
    )


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Nothing is imported for the question: a program that has one has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if is_distributed(tensor) else tensor


def _layout(tensor: Any) -> tuple[Any, Any]:
    return tensor.device_mesh, tuple(tensor.placements)


def _said(tensor: Any) -> str:
    return f"DTensor {tuple(tensor.placements)}" if is_distributed(tensor) else type(tensor).__name__


def _refuse_wrapper(tensor: Tensor, name: str) -> None:
    without_memory = (
        tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() > 0 and tensor.data_ptr() == 0
    )
    if is_traceable_wrapper_subclass(tensor) or without_memory:
        raise TensorError(
            f"{name}: got a {type(tensor).__name__}, which has no memory of its own; expected a plain tensor or a"
            " DTensor"
        )


def working_slot(slot: Slot, *, row_major: bool) -> Slot:
    """The slot as kernels take it: itself, or one with working copies. Raises `TensorError`.

    `row_major`: the rule depends on the index of an element (scales per block), so that no other order will do.
    """
    if slot.grad.layout is torch.sparse_coo:
        return _touched_rows(slot)
    given = (slot.param, slot.grad, *slot.states, slot.low_bits, slot.copy)
    if all(t.is_contiguous() for t in given if t is not None):
        return slot
    return _Arrangement(slot, row_major).slot()


class _Arrangement:
    """Collects the working copies of one slot."""

    def __init__(self, slot: Slot, row_major: bool) -> None:
        self.given = slot
        dense = is_dense(slot.param) and not row_major
        self.order = slot.param if dense else torch.empty(slot.param.shape, device="meta")
        self.copies: list[WorkingCopy] = []

    def slot(self) -> Slot:
        s = self.given
        return replace(
            s,
            param=self.written(s.param, "parameter"),
            grad=self.read(s.grad, "gradient"),
            states=tuple(self.written(t, "optimizer state") for t in s.states),
            low_bits=None if s.low_bits is None else self.written(s.low_bits, "low bits"),
            copy=None if s.copy is None else self.written(s.copy, "copy"),
            copies=tuple(self.copies),
            owner=s,
        )

    def read(self, tensor: Tensor, role: str) -> Tensor:
        if tensor.shape != self.order.shape:
            raise TensorError(
                f"{self.given.name}: got a {role} of shape {tuple(tensor.shape)}, expected {tuple(self.order.shape)},"
                " since the parameter or its gradient is not contiguous"
            )
        if is_dense(tensor) and same_order(tensor, self.order):
            return tensor
        return torch.empty_like(self.order, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    def written(self, tensor: Tensor, role: str) -> Tensor:
        work = self.read(tensor, role)
        if work is not tensor:
            if may_overlap(tensor):
                raise TensorError(
                    f"{self.given.name}: elements of the {role} share memory (strides {tuple(tensor.stride())}), so"
                    " that an update would be written more than once; make it a tensor of its own with .contiguous()"
                )
            self.copies.append(WorkingCopy(tensor, work))
        return work


def _touched_rows(slot: Slot) -> Slot:
    """Of a sparse gradient: only the elements that it names, as torch.optim.Adagrad does."""
    grad = slot.grad.coalesce()
    index = tuple(grad.indices().unbind())
    written = (slot.param, *slot.states)
    works = [t[index].contiguous() for t in written]
    copies = [WorkingCopy(t, w, index) for t, w in zip(written, works)]
    if slot.copy is not None:  # of the whole parameter, once its rows are back
        copies.append(WorkingCopy(slot.copy, slot.param))
    return replace(
        slot,
        param=works[0],
        grad=grad.values().contiguous(),
        states=tuple(works[1:]),
        copy=None,
        copies=tuple(copies),
        owner=slot,
    )
