"""Batches of CPU tensors, given to the compiled kernels as tables of addresses."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..spec import Algorithm, Batch, Lowered, Slot

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, None: 4, torch.uint8: 4}
_SPLIT = 3


WIDTH = 10  # columns of a table
PARAM, GRAD = 0, 1


def columns(slot: Slot) -> tuple[Tensor | None, ...]:
    """The tensors of a slot in the order of the table's first columns; after them come numel and offset."""
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


def table(batch: Batch) -> array:
    """Addresses and sizes, one row per slot."""
    numbers = array("q")
    for slot in batch.slots:
        numbers.extend(0 if t is None else t.data_ptr() for t in columns(slot))
        numbers.extend((slot.param.numel(), slot.offset))
    return numbers


def dtypes(batch: Batch) -> list[int]:
    """Of parameter, gradient, state and copy, as the native `DType`."""
    s = batch.slots[0]
    return [
        _SPLIT if s.low_bits is not None else _DTYPES[s.param.dtype],
        _DTYPES[s.grad.dtype],
        _DTYPES[s.states[0].dtype] if s.states else 0,
        _DTYPES[s.copy.dtype if s.copy is not None else None],
    ]


def run(module: Any, batch: Batch) -> None:
    """Apply the batch's update in one call."""
    step(module, batch.algorithm, table(batch), dtypes(batch), batch.hyper.lowered(batch.algorithm))


def step(module: Any, algorithm: Algorithm, rows: array, kinds: list[int], numbers: Lowered) -> None:
    """One update of all rows of a table."""
    module.step(int(algorithm), rows, kinds, numbers.numbers(), numbers.flags(), numbers.seed, native.threads())


def lamb_update(module: Any, batch: Batch) -> Tensor:
    """Phase 1 of Lamb; fp64 [slots, 2]."""
    numbers = batch.hyper.lowered(Algorithm.LAMB)
    rows = module.lamb_update(table(batch), dtypes(batch), numbers.numbers(), numbers.flags(), native.threads())
    return torch.tensor(rows, dtype=torch.float64).view(-1, 2)


def lamb_apply(module: Any, batch: Batch, coefficients: Tensor) -> None:
    """Phase 2 of Lamb."""
    numbers = batch.hyper.lowered(Algorithm.LAMB)
    module.lamb_apply(
        table(batch), dtypes(batch), numbers.numbers(), numbers.flags(), coefficients.tolist(), native.threads()
    )


def _flat_table(tensors: list[Tensor]) -> array:
    numbers = array("q")
    for t in tensors:
        numbers.extend((t.data_ptr(), t.numel(), _DTYPES[t.dtype]))
    return numbers


def squares(module: Any, tensors: list[Tensor]) -> Tensor:
    """fp64 sum of squares per tensor."""
    return torch.tensor(module.squares(_flat_table(tensors), native.threads()), dtype=torch.float64)


def scale(module: Any, tensors: list[Tensor], factor: float) -> None:
    """Multiply in place."""
    module.scale(_flat_table(tensors), factor, native.threads())
