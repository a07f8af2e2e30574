"""Whether dsx-zero averages the gradients of a step, or an optimizer that communicates by itself.

`dsx_comm.OneBitAdam` and similar optimizers exchange momenta, not gradients: in some of their steps every rank's own
gradients must stay as they are. This file asks such an optimizer what dsx-zero has to know, so that other files use an
`Averaging` and no optimizer's methods. `dsx_comm.onebit.rules` decides what such an optimizer cannot be combined with,
for configurations too.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from dsx_comm.onebit import rules

from ..errors import ZeroConfigError, ZeroOptimizerError
from .reduction import Reduction

__all__ = ["Averaging", "AveragesItself", "ByOptimizer", "ByReduction", "averages_itself", "averaging_of"]

_log = logging.getLogger(__name__)


@runtime_checkable
class AveragesItself(Protocol):
    """The methods of an optimizer that communicates by itself. Every optimizer that has them is treated as one."""

    @property
    def takes_local_gradients(self) -> bool:
        """Whether the coming step wants each rank's own gradients, not their mean."""
        ...

    def expect_averaged_gradients(self, wire_dtype: torch.dtype | None = None) -> None:
        """In all other steps gradients come averaged, sent in `wire_dtype`."""
        ...

    def synchronize(self) -> None:
        """Make parameters equal on all ranks where they differ between steps. Collective."""
        ...


def averages_itself(optimizer: object) -> TypeGuard[AveragesItself]:
    """Whether an optimizer communicates by itself."""
    return isinstance(optimizer, AveragesItself)


class Averaging(Protocol):
    """How the gradients of one sharded model are averaged."""

    def local(self) -> bool:
        """Do the coming step's gradients stay each rank's own?"""
        ...

    def announce_clipping(self, max_norm: float | None) -> None:
        """The coming step clips to `max_norm`. If that is not the norm of the mean gradient, log once what it is."""
        ...

    def announce(self, wire_dtype: torch.dtype | None) -> None:
        """Tell an optimizer that communicates by itself that the gradients of its other steps are averaged here."""
        ...

    def synchronize(self) -> bool:
        """Make masters equal on all ranks; True if they may have changed. Collective."""
        ...


class ByReduction:
    """dsx-zero averages in every step."""

    def local(self) -> bool:
        """Never."""
        return False

    def announce_clipping(self, max_norm: float | None) -> None:
        """Nothing to say: every norm is that of the mean gradient."""

    def announce(self, wire_dtype: torch.dtype | None) -> None:
        """The optimizer does not communicate."""

    def synchronize(self) -> bool:
        """They are equal."""
        return False


class ByOptimizer:
    """`optimizer` averages in the steps it says."""

    def __init__(self, optimizer: AveragesItself, rank: int) -> None:
        self._optimizer = optimizer
        self._silent = rank != 0

    def local(self) -> bool:
        """In the steps that the optimizer says."""
        return self._optimizer.takes_local_gradients

    def announce_clipping(self, max_norm: float | None) -> None:
        """See `Averaging.announce_clipping`: one line, on rank 0, before the first step with local gradients."""
        if not max_norm or self._silent or not self.local():
            return
        self._silent = True
        _log.warning(rules.clipping_note(type(self._optimizer).__name__, max_norm))

    def announce(self, wire_dtype: torch.dtype | None) -> None:
        """See `Averaging.announce`."""
        self._optimizer.expect_averaged_gradients(wire_dtype)

    def synchronize(self) -> bool:
        """See `Averaging.synchronize`."""
        self._optimizer.synchronize()
        return True


def averaging_of(optimizer: Any, reduction: Reduction, *, stage: int, rank: int, plain: bool = True) -> Averaging:
    """The `Averaging` for an optimizer. `plain`: all parameters are averaged over the same ranks, and nothing else is.

    Raises:
        ZeroOptimizerError: it averages by itself and the stage is not 0, or the model has experts or slices.
        ZeroConfigError: it averages by itself and a sum is asked for.
    """
    if not averages_itself(optimizer):
        return ByReduction()
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
