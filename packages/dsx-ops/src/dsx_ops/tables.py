"""The names of tensors for the compiled modules: dtype codes, lists of addresses, and tables with one row per tensor of
an update.

The CPU module and the CUDA module read the same tables; `native/include/dsx_ops/kernels.h` is their definition.
A tensor that a table names must be kept by the caller until the kernel has returned (on CUDA: has been started).

A compiled kernel gets an address and writes there. Autograd learns of writes by the version of a tensor: a graph that
saved the old values compares versions in backward, and raises. So code that hands out addresses to be written calls
`wrote` or `wrote_slots` once per call (without it, a backward through such a graph runs and gives wrong gradients).
Operators of `torch.ops.dsx_ops` need not: `library.operator` does it for all arguments that their schema marks as
written. Tensors made in inference mode have no version; torch leaves them out.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .spec import Batch, Slot

# `DType` of kernels.h. Codes of 8 bits have no dtype of their own there, as little as an absent tensor.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 4, None: 4}
SPLIT = 3  # a bf16 parameter with the low bits of its fp32 master

COLUMNS = 10  # of an update's table
PARAM, GRAD = 0, 1


def addresses(*tensors: Tensor | None) -> list[int]:
    """The addresses of the tensors, 0 for None."""
    return [0 if t is None else t.data_ptr() for t in tensors]


def tensor_columns(slot: Slot) -> tuple[Tensor | None, ...]:
    """The tensors of a slot in the order of the table's first columns; numel and offset come after them."""
    states, scales = slot.states, slot.scales
    return (
        slot.param,
        slot.grad,
        states[0] if states else None,
        states[1] if len(states) > 1 else None,
        slot.low_bits,
        slot.copy,
        scales[0] if scales else None,
        scales[1] if scales else None,
    )


def update_table(batch: Batch) -> array[int]:
    """Addresses and sizes, one row of `COLUMNS` numbers per slot."""
    numbers = array("q")
    for slot in batch.slots:
        numbers.extend(addresses(*tensor_columns(slot)))
        numbers.extend((slot.param.numel(), slot.offset))
    return numbers


def update_dtypes(batch: Batch) -> list[int]:
    """Codes of parameter, gradient, state and copy, which all slots of a batch share."""
    slot = batch.slots[0]
    return [
        SPLIT if slot.low_bits is not None else DTYPE_CODES[slot.param.dtype],
        DTYPE_CODES[slot.grad.dtype],
        DTYPE_CODES[slot.states[0].dtype] if slot.states else 0,
        DTYPE_CODES[slot.copy.dtype if slot.copy is not None else None],
    ]


def flat_table(tensors: Iterable[Tensor]) -> array[int]:
    """Rows of (address, numel, dtype)."""
    numbers = array("q")
    for t in tensors:
        numbers.extend((t.data_ptr(), t.numel(), DTYPE_CODES[t.dtype]))
    return numbers


def wrote(tensors: Iterable[Tensor]) -> None:
    """A kernel has written (on CUDA: will have written, in the order of the stream) to these tensors."""
    increment_version(list(tensors))


def wrote_slots(slots: Iterable[Slot], *, params: bool = True, states: bool = True) -> None:
    """An update has written to the slots: `params` with their low bits and copies, `states` with their scales."""
    wrote(t for slot in slots for part in _with_owner(slot) for t in _written(part, params, states))


def _with_owner(slot: Slot) -> Iterator[Slot]:
    yield slot
    if slot.owner is not None:
        yield from _with_owner(slot.owner)


def _written(slot: Slot, params: bool, states: bool) -> Iterator[Tensor]:
    if params:
        yield slot.param
        if slot.low_bits is not None:
            yield slot.low_bits
        if slot.copy is not None:
            yield slot.copy
    if states:
        yield from slot.states
        yield from slot.scales
