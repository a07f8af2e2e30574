"""Batches and lists of CPU tensors, given to the compiled kernels as tables of addresses."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..spec import Algorithm, Batch, Lowered
from ..tables import flat_table, update_dtypes, update_table, wrote, wrote_slots


def run(module: Any, batch: Batch) -> None:
    """Apply the batch's update in one call."""
    step(module, batch.algorithm, update_table(batch), update_dtypes(batch), batch.hyper.lowered(batch.algorithm))
    wrote_slots(batch.slots)


def step(module: Any, algorithm: Algorithm, rows: array, kinds: list[int], numbers: Lowered) -> None:
    """One update of all rows of a table; the caller tells autograd."""
    module.step(int(algorithm), rows, kinds, numbers.numbers(), numbers.flags(), numbers.seed, native.threads())


def lamb_update(module: Any, batch: Batch) -> Tensor:
    """Phase 1 of Lamb; fp64 [slots, 2]."""
    numbers, kinds = batch.hyper.lowered(Algorithm.LAMB), update_dtypes(batch)
    rows = module.lamb_update(update_table(batch), kinds, numbers.numbers(), numbers.flags(), native.threads())
    wrote_slots(batch.slots, params=False)
    return torch.tensor(rows, dtype=torch.float64).view(-1, 2)


def lamb_apply(module: Any, batch: Batch, coefficients: Tensor) -> None:
    """Phase 2 of Lamb."""
    numbers, kinds, factors = batch.hyper.lowered(Algorithm.LAMB), update_dtypes(batch), coefficients.tolist()
    module.lamb_apply(update_table(batch), kinds, numbers.numbers(), numbers.flags(), factors, native.threads())
    wrote_slots(batch.slots, states=False)


def squares(module: Any, tensors: list[Tensor]) -> Tensor:
    """fp64 sum of squares per tensor."""
    return torch.tensor(module.squares(flat_table(tensors), native.threads()), dtype=torch.float64)


def scale(module: Any, tensors: list[Tensor], factor: float) -> None:
    """Multiply in place."""
    module.scale(flat_table(tensors), factor, native.threads())
    wrote(tensors)
