"""Batches of CPU tensors, given to the compiled kernels as tables of addresses."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..spec import Algorithm, Batch

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, None: 4, torch.uint8: 4}
_SPLIT = 3


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _table(batch: Batch) -> array:
    numbers = array("q")
    for s in batch.slots:
        states, scales = s.states, s.scales
        numbers.extend((
            s.param.data_ptr(),
            s.grad.data_ptr(),
            states[0].data_ptr() if states else 0,
            states[1].data_ptr() if len(states) > 1 else 0,
            _address(s.low_bits),
            _address(s.copy),
            scales[0].data_ptr() if scales else 0,
            scales[1].data_ptr() if scales else 0,
            s.param.numel(),
            s.offset,
        ))  # fmt: skip
    return numbers


def _dtypes(batch: Batch) -> list[int]:
    s = batch.slots[0]
    return [
        _SPLIT if s.low_bits is not None else _DTYPES[s.param.dtype],
        _DTYPES[s.grad.dtype],
        _DTYPES[s.states[0].dtype] if s.states else 0,
        _DTYPES[s.copy.dtype if s.copy is not None else None],
    ]


def run(module: Any, batch: Batch) -> None:
    """Apply the batch's update in one call."""
    numbers = batch.hyper.lowered(batch.algorithm)
    module.step(
        int(batch.algorithm),
        _table(batch),
        _dtypes(batch),
        numbers.numbers(),
        numbers.flags(),
        numbers.seed,
        native.threads(),
    )


def lamb_update(module: Any, batch: Batch) -> Tensor:
    """Phase 1 of Lamb; fp64 [slots, 2]."""
    numbers = batch.hyper.lowered(Algorithm.LAMB)
    rows = module.lamb_update(_table(batch), _dtypes(batch), numbers.numbers(), numbers.flags(), native.threads())
    return torch.tensor(rows, dtype=torch.float64).view(-1, 2)


def lamb_apply(module: Any, batch: Batch, coefficients: Tensor) -> None:
    """Phase 2 of Lamb."""
    numbers = batch.hyper.lowered(Algorithm.LAMB)
    module.lamb_apply(
        _table(batch), _dtypes(batch), numbers.numbers(), numbers.flags(), coefficients.tolist(), native.threads()
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
