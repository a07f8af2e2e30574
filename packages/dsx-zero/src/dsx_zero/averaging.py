"""Who averages the gradients of a step: dsx-zero, or an optimizer that communicates by itself.

`dsx_comm.OneBitAdam` and its kin exchange momenta, not gradients: in some of their steps every rank's own gradients must stay as they
are. What dsx-zero has to ask such an optimizer is asked here, so that the rest knows an `Averaging` and no optimizer's methods.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch

from .errors import ZeroConfigError, ZeroOptimizerError
from .reduction import Reduction

__all__ = ["Averaging", "AveragesItself", "ByOptimizer", "ByReduction", "averages_itself", "averaging_of"]


@runtime_checkable
class AveragesItself(Protocol):
    """What an optimizer offers that communicates by itself. Any that does is treated so, whoever wrote it."""

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
    """The answer for one sharded model."""

    def local(self) -> bool:
        """Do the coming step's gradients stay each rank's own?"""
        ...

    def check_norm(self, max_norm: float | None) -> None:
        """Raises ZeroOptimizerError where no rank knows the norm to clip by."""
        ...

    def announce(self, wire_dtype: torch.dtype | None) -> None:
        """Tell who has to know that other steps' gradients are averaged here."""
        ...

    def synchronize(self) -> bool:
        """Make masters equal on all ranks; True if they may have changed. Collective."""
        ...


class ByReduction:
    """dsx-zero averages in every step."""

    def local(self) -> bool:
        """Never."""
        return False

    def check_norm(self, max_norm: float | None) -> None:
        """Every norm is known."""

    def announce(self, wire_dtype: torch.dtype | None) -> None:
        """Nobody has to know."""

    def synchronize(self) -> bool:
        """They are equal."""
        return False


class ByOptimizer:
    """`optimizer` averages in the steps it says."""

    def __init__(self, optimizer: AveragesItself) -> None:
        self._optimizer = optimizer

    def local(self) -> bool:
        """In the steps that the optimizer says."""
        return self._optimizer.takes_local_gradients

    def check_norm(self, max_norm: float | None) -> None:
        """See `Averaging.check_norm`."""
        if max_norm and self.local():
            raise ZeroOptimizerError(
                f"step(max_norm={max_norm}): {type(self._optimizer).__name__} works on local gradients, and no rank knows the norm of "
                "their mean; step without max_norm"
            )

    def announce(self, wire_dtype: torch.dtype | None) -> None:
        """See `Averaging.announce`."""
        self._optimizer.expect_averaged_gradients(wire_dtype)

    def synchronize(self) -> bool:
        """See `Averaging.synchronize`."""
        self._optimizer.synchronize()
        return True


def averaging_of(optimizer: Any, reduction: Reduction) -> Averaging:
    """Who averages for this optimizer.

    Raises ZeroConfigError where it averages by itself and a sum is asked for.
    """
    if not averages_itself(optimizer):
        return ByReduction()
    if reduction.op != "mean":
        raise ZeroConfigError(
            "gradient_allreduce_op", f'got "{reduction.op}", but {type(optimizer).__name__} averages; expected "mean"'
        )
    return ByOptimizer(optimizer)
