"""Slots whose tensors lie in memory in different orders, or whose gradient is sparse: working copies stand in for them.

Dense tensors of equal strides (channels_last, transposed) need none. The order is the parameter's where that is dense,
else row-major.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import TensorError
from ..layouts import WorkingCopy, is_dense, may_overlap, same_order
from ..spec import Slot


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
