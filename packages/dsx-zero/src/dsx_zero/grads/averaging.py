"""Decides whether dsx-zero averages the gradients of a step, or an optimizer that communicates itself.

`dsx_comm.OneBitAdam` and similar optimizers exchange momenta, not gradients: in some of their steps every rank's own
gradients must stay as they are. This file calls the methods of such an optimizer; other files use `ByOptimizer`, and
None where dsx-zero averages the gradients of every step.
`dsx_comm.onebit.rules` says with which settings such an optimizer cannot be combined, for configurations too.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from dsx_comm.onebit import rules

from ..errors import ZeroConfigError, ZeroOptimizerError
from .reduction import Reduction

__all__ = ["AveragesItself", "ByOptimizer", "averages_itself", "averaging_of"]

_log = logging.getLogger(__name__)


@runtime_checkable
class AveragesItself(Protocol):
    """The methods of an optimizer that communicates itself. Every optimizer with these methods is treated so."""

    @property
    def takes_local_gradients(self) -> bool:
        """Whether the next step needs each rank's own gradients, not their mean."""
        ...

    def expect_averaged_gradients(self, wire_dtype: torch.dtype | None = None) -> None:
        """Note that in all other steps the gradients are averaged already, and were sent in `wire_dtype`."""
        ...

    def synchronize(self) -> None:
        """Make parameters that differ between ranks equal. Collective."""
        ...


def averages_itself(optimizer: object) -> TypeGuard[AveragesItself]:
    """Whether an optimizer communicates itself."""
    return isinstance(optimizer, AveragesItself)


class ByOptimizer:
    """The optimizer averages in the steps in which its `takes_local_gradients` is true."""

    def __init__(self, optimizer: AveragesItself, rank: int) -> None:
        self._optimizer = optimizer
        self._silent = rank != 0

    def local(self) -> bool:
        """Whether the optimizer averages in the next step."""
        return self._optimizer.takes_local_gradients

    def announce_clipping(self, max_norm: float | None) -> None:
        """The next step clips to `max_norm`. Rank 0 logs one line before the first such step with local gradients: the
        norm is not that of the mean gradient then.
        """
        if not max_norm or self._silent or not self.local():
            return
        self._silent = True
        _log.warning(rules.clipping_note(type(self._optimizer).__name__, max_norm))

    def announce(self, wire_dtype: torch.dtype | None) -> None:
        """Tell the optimizer that dsx-zero averages the gradients of its other steps."""
        self._optimizer.expect_averaged_gradients(wire_dtype)

    def synchronize(self) -> None:
        """Make masters equal on all ranks (collective)."""
        self._optimizer.synchronize()


def averaging_of(
    optimizer: Any, reduction: Reduction, *, stage: int, rank: int, plain: bool = True
) -> ByOptimizer | None:
    """The optimizer, if it communicates itself and averages instead of dsx-zero in some steps. Else None.

    Args:
        plain: all parameters are averaged over the same ranks (no experts, slices or shared weights of stages).

    Raises:
        ZeroOptimizerError: the optimizer communicates itself, and the stage is not 0 or `plain` is false.
        ZeroConfigError: the optimizer communicates itself, and the configuration asks for the sum of gradients.
    """
    if not averages_itself(optimizer):
        return None
    name = type(optimizer).__name__
    for conflict in rules.conflicts(name, zero_stage=stage, gradient_allreduce_op=reduction.op):
        if conflict.key == "gradient_allreduce_op":
            raise ZeroConfigError(
                conflict.key, f"got {conflict.got}, but {conflict.reason}; expected {conflict.expected}"
            )
        raise ZeroOptimizerError(
            f"{name} cannot be used at stage {stage}: {conflict.reason}; use stage {conflict.expected}"
        )
    if not plain:
        raise ZeroOptimizerError(
            f"{name} averages all parameters over one group of ranks, and this model has parameters that only some"
            " ranks hold (experts, slices of tensors, weights that pipeline stages share); use AdamW, or another"
            " optimizer that leaves averaging to dsx_zero"
        )
    return ByOptimizer(optimizer, rank)
