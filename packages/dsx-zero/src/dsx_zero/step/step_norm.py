"""How one step gets the norm of its gradients. While it does, the ranks agree that all of them are at their step.

There are three ways. Which one a step takes is the same on all ranks.

* Where the host reads the norm anyway (on a CPU, or for the check of overflow), this rank's sum of squares is one of
  the words that the ranks exchange (`order.agreed`).
* Elsewhere the host does not wait for the device: the squares are added up by an all-reduce on the device, and the host
  launches this rank's part while the words travel.
* With `step_agreement: norm` no words are sent in a step whose order is frozen. What the ranks agree on is added up
  with their squares (`SquaresAndRows`), and the host reads these sums.

Left out: the arithmetic of norms (`norm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import dsx_comm
import torch

from ..runtime import Runtime
from .failures import StepFailure
from .norm import CLIP_EPSILON, norm_of, sum_of_squares

__all__ = ["SquaresAndRows", "StepNorm", "clip_factor"]

_Squares = Callable[[], tuple[torch.Tensor, bool]]
"""Gives this rank's part of the square of the norm, and whether all gradients are fp64."""


class SquaresAndRows:
    """The `RowSum` of an order, which adds squares of gradients up in the same all-reduce.

    A rank that takes part without squares does it at another place among the collectives than the others. So the group
    is for this alone.

    Args:
        group: of the data-parallel ranks.
        device: where the squares are.
        squares: called whenever rows are added up.
    """

    def __init__(self, group: Any, device: torch.device, squares: _Squares) -> None:
        self.ranks = dsx_comm.get_world_size(group)
        self._group, self._device, self._squares = group, device, squares
        self._under_way: tuple[Any, torch.Tensor] | None = None
        self.total: torch.Tensor | None = None
        """The sum of the ranks' squares in the last call of `add_up`."""
        self.all_double = False

    def add_up(self, row: Sequence[float]) -> list[float]:
        """See `RowSum.add_up`."""
        sums = self._begin(row)
        sums[0], self.all_double = self._squares()
        dsx_comm.all_reduce(sums, op=dsx_comm.ReduceOp.SUM, group=self._group)
        self.total = sums[0]
        return sums[1:].tolist()

    def take_part(self, row: Sequence[float]) -> None:
        """See `RowSum.take_part`."""
        sums = self._begin(row)
        handle = dsx_comm.all_reduce(sums, op=dsx_comm.ReduceOp.SUM, group=self._group, async_op=True)
        self._under_way = handle, sums

    def _begin(self, row: Sequence[float]) -> torch.Tensor:
        """What this rank adds: no squares, and the row. The sums of an earlier step end first: all ranks took part."""
        if self._under_way is not None:
            self._under_way[0].wait()
            self._under_way = None
        return torch.tensor([0.0, *row], dtype=torch.float64).to(self._device, non_blocking=True)


class StepNorm:
    """The norm of the running step.

    Args:
        device: where the norm is computed.
        failure: collects what fails in the step.
        group: a group of the data-parallel ranks for norms alone, with which they agree; None: they agree by words.
    """

    def __init__(self, runtime: Runtime, device: torch.device, failure: StepFailure, group: Any = None) -> None:
        self._runtime, self._device, self._failure = runtime, device, failure
        self._mine: tuple[torch.Tensor, bool] | None = None
        """This rank's part of the square of the norm, and whether all gradients are fp64; None where it was not
        computed before the ranks had agreed.
        """
        self._total: torch.Tensor | None = None
        """The squares of all data-parallel ranks, where they were added up while the ranks agreed: on the host where
        the host reads them.
        """
        self._all_double = False
        self._with_rows: SquaresAndRows | None = None
        if group is not None:
            self._with_rows = SquaresAndRows(group, device, self._squares_to_add_up)
            runtime.gradients.agree_by(self._with_rows)

    def finish_gradients(self) -> None:
        """Complete the reductions of the step, and agree with the other ranks (collective)."""
        gradients, with_rows = self._runtime.gradients, self._with_rows
        launch = partial(self._launch, local=self._runtime.averaging.local())
        self._mine = self._total = None
        if with_rows is not None:
            gradients.finish(meanwhile=launch)  # launches where the ranks could not agree by sums
            if self._mine is None:
                self._total, self._all_double = with_rows.total, with_rows.all_double
        elif not self.host_reads():
            gradients.finish(meanwhile=launch)
        elif (total := gradients.finish(self._read)) is not None:
            self._total = torch.tensor(total, dtype=torch.float64)

    def host_reads(self) -> bool:
        """Whether this rank's squares can travel with the words of the ranks. Elsewhere they would make the host wait
        for the device.
        """
        run = self._runtime
        if run.ranks.size == 1 or run.averaging.local() or run.ranks.group not in run.norm_groups:
            return False
        return self._device.type == "cpu" or (run.checks_overflow and self._device.type != "mps")

    def norm(self, grad_scale: float, *, needed: bool) -> torch.Tensor:
        """L2 norm of the unscaled gradients that the ranks hold together; at stage 0 of what this rank holds, which
        is everything. Where gradients stay each rank's own, replicas do not count, and stages of a pipeline do. It is
        on the host if that knows it already, else on the device.
        """
        run = self._runtime
        if not needed:
            return torch.zeros(())
        local = run.averaging.local()
        groups = [group for group in run.norm_groups if not local or group != run.ranks.group]
        if self._total is None:
            total, all_double = self._mine or self._squares(groups, whole=run.whole and not local)
        else:
            total, all_double = self._total, self._all_double
            groups = [group for group in groups if group is not run.ranks.group]
            if groups and total.device != self._device:
                # Filling does not make the host wait, as an upload of the number would.
                total = torch.full((), total.item(), dtype=total.dtype, device=self._device)
        norm = norm_of(total, groups, all_double=all_double)
        return norm if grad_scale == 1.0 else norm / grad_scale

    def sum_over_ranks(self, norm: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' own norms: not finite where one of them is not (collective)."""
        total = norm.clone()
        ranks = self._runtime.ranks
        if ranks.size > 1:
            dsx_comm.all_reduce(total, op=dsx_comm.ReduceOp.SUM, group=ranks.group)
        return total

    def _squares(self, groups: Sequence[Any], *, whole: bool) -> tuple[torch.Tensor, bool]:
        """This rank's part of the square of the norm; zero where it could not be computed and the step ends so."""

        def squares() -> tuple[torch.Tensor, bool]:
            return sum_of_squares(self._runtime.gradients.norms(), device=self._device, alone=not groups, whole=whole)

        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        return self._failure.run(squares, (torch.zeros((), dtype=dtype, device=self._device), False))

    def _squares_to_add_up(self) -> tuple[torch.Tensor, bool]:
        """This rank's part of the squares that are added up over `Runtime.norm_groups`."""
        return self._squares(self._runtime.norm_groups, whole=self._runtime.whole)

    def _launch(self, *, local: bool) -> None:
        """Start computing this rank's part of the square of the norm on the device. The words of the other ranks travel
        while the host launches it.
        """
        if not local:
            self._mine = self._squares_to_add_up()

    def _read(self) -> float:
        """This rank's part of the square of the norm, on the host."""
        squares, self._all_double = self._squares_to_add_up()
        return squares.item()


def clip_factor(norm: torch.Tensor, grad_scale: float, max_norm: float | None) -> float | torch.Tensor:
    """What gradients are multiplied with. A number on the host's device, a tensor elsewhere (no waiting)."""
    if not max_norm:
        return 1.0 / grad_scale
    if norm.device.type == "cpu":
        value = norm.item()
        # `min` of a NaN is order-dependent; a NaN norm must show in the parameters, as in plain PyTorch.
        clip = max_norm / (value + CLIP_EPSILON)
        return (clip if clip < 1.0 or clip != clip else 1.0) / grad_scale
    return ((max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0) / grad_scale).to(torch.float32)
