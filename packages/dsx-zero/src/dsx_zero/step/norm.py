"""The global gradient norm, which is the overflow check too: its arithmetic, and how one step gets it.

Each rank makes one pass over the gradients it holds, and the ranks add up one number each.

A non-finite gradient makes the sum of squares non-finite on every rank, so that the norm is the overflow flag too. The
norm kernel sums squares per buffer in fp32; sums of buffers are added in fp64. A sum of squares beyond fp32 counts as
infinite, as in torch's own norms. Without that rule the result would depend on which elements share a buffer, and so on
the stage and the number of ranks.

While a step gets its norm, the ranks agree that all of them are at their step. There are three ways. Which one a step
takes is the same on all ranks.

* Where the host reads the norm anyway (on a CPU, or for the check of overflow), this rank's sum of squares is one of
  the words that the ranks exchange (`order.agreed`).
* Elsewhere the host does not wait for the device: the squares are added up by an all-reduce on the device, and the host
  launches this rank's part while the words travel.
* With `step_agreement: norm` no words are sent in a step whose order is frozen. What the ranks agree on is added up
  with their squares (`SquaresAndRows`), and the host reads these sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import dsx_comm
import torch
from dsx_comm import RankSet

from ..errors import ZeroModelError
from .runner import StepFailure

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["SquaresAndRows", "StepNorm", "clip_factor", "groups_of_norm", "norm_of", "sum_of_squares", "usual_factor"]

_LARGEST = torch.finfo(torch.float32).max

_CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as `torch.nn.utils.clip_grad_norm_` does."""

_Squares = Callable[[], tuple[torch.Tensor, bool]]
"""Gives this rank's part of the square of the norm, and whether all gradients are fp64."""


def groups_of_norm(sets: Collection[RankSet], data: RankSet, *, whole: bool) -> tuple[Any, ...]:
    """The groups over which the squares of a model's gradients are summed, one after the other.

    There are none where every rank holds all gradients: plain data parallelism whose buffers are not divided (`whole`).

    Raises:
        ZeroModelError: the rank sets of the model's parameters do not agree on the groups, so that ranks would wait for
            each other.
    """
    for ranks in sets:
        if ranks.norm_groups != data.norm_groups:
            raise ZeroModelError(
                f"the rank set {ranks} sums norms over {len(ranks.norm_groups)} groups and {data} over"
                f" {len(data.norm_groups)}, or over others; give all rank sets of one model the same norm_groups"
            )
    plain = set(sets) <= {data} and data.norm_groups in ((), (data.group,)) and data.counts_in_norm
    return () if whole and plain else data.norm_groups


def sum_of_squares(
    blocks: Iterable[tuple[RankSet, torch.Tensor]], *, device: torch.device, alone: bool, whole: bool
) -> tuple[torch.Tensor, bool]:
    """This rank's contribution to the square of the norm, a 0-dim fp64 tensor on `device` (fp32 where the device lacks
    fp64), and whether all gradients are fp64.

    Args:
        blocks: the norm of each of this rank's gradient buffers (`block_norm`), with the ranks that share it.
        alone: no other rank's squares are added, because every rank holds all gradients.
        whole: each of a block's ranks holds all of it (otherwise a shard), so that only the first of them counts.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=dtype, device=device)
    norms, counted, all_double = [], [], True
    for ranks, norm in blocks:
        counted.append(alone or (ranks.counts_in_norm and not (whole and ranks.rank)))
        norms.append(norm)
        all_double = all_double and norm.dtype == torch.float64
    if norms:
        squares = torch.stack(_brought(norms, device, dtype)).square()
        if not all(counted):
            # Multiplied by zero instead of left out: if any copy is not finite, so is the norm, on all ranks. Then all
            # ranks skip the step together.
            squares = squares * torch.tensor(counted, dtype=dtype, device="cpu").to(device, non_blocking=True)
        total += squares.sum()
    return total, all_double


def _brought(norms: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norms on a device. Those in host memory travel together, and on CUDA the host does not wait for them."""
    away = [place for place, norm in enumerate(norms) if norm.device.type == "cpu" and device.type != "cpu"]
    there = [norm if place in away else norm.to(device=device, dtype=dtype) for place, norm in enumerate(norms)]
    if away:
        message = torch.stack([norms[place].to(dtype) for place in away])
        message = message.pin_memory() if device.type == "cuda" else message
        for place, norm in zip(away, message.to(device, non_blocking=True).unbind()):
            there[place] = norm
    return there


def norm_of(total: torch.Tensor, groups: Sequence[Any], *, all_double: bool) -> torch.Tensor:
    """L2 norm over all gradients from this rank's sum of squares: a 0-dim tensor like `total`.

    Args:
        groups: process groups over which squares are summed, one after the other.
        all_double: see `sum_of_squares`.
    """
    for group in groups:
        dsx_comm.all_reduce(total, op=dsx_comm.ReduceOp.SUM, group=group)
    if all_double:
        return total.sqrt()
    return torch.where(total > _LARGEST, math.inf, total).sqrt()


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
        """The sum of the ranks' squares in the last call of `add_up`, on the host."""
        self.all_double = False

    def add_up(self, row: Sequence[float]) -> list[float]:
        """See `RowSum.add_up`."""
        sums = self._begin(row)
        sums[0], self.all_double = self._squares()
        dsx_comm.all_reduce(sums, op=dsx_comm.ReduceOp.SUM, group=self._group)
        total, *rows = sums.tolist()  # at once: a second read would be a second wait for the device
        self.total = torch.tensor(total, dtype=torch.float64, device="cpu")
        return rows

    def take_part(self, row: Sequence[float]) -> None:
        """See `RowSum.take_part`."""
        sums = self._begin(row)
        handle = dsx_comm.all_reduce(sums, op=dsx_comm.ReduceOp.SUM, group=self._group, async_op=True)
        self._under_way = handle, sums

    def _begin(self, row: Sequence[float]) -> torch.Tensor:
        """The numbers that this rank adds: no squares, and the row. The sums of an earlier step end first: all ranks
        took part.
        """
        if self._under_way is not None:
            self._under_way[0].wait()
            self._under_way = None
        return torch.tensor([0.0, *row], dtype=torch.float64, device="cpu").to(self._device, non_blocking=True)


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
            runtime.gradients.order.agree_by(self._with_rows)

    @property
    def on_host(self) -> bool:
        """Whether the norm is on the host when the step clips: it is computed there, or was read for overflow."""
        return self._device.type == "cpu" or self._runtime.checks_overflow

    def finish_gradients(self, *, local: bool) -> None:
        """Complete the reductions of the step, and agree with the other ranks (collective).

        Args:
            local: each rank keeps its own gradients in this step.
        """
        gradients, with_rows = self._runtime.gradients, self._with_rows
        launch = None if local else self._launch
        self._mine = self._total = None
        if with_rows is not None:
            gradients.finish(meanwhile=launch)  # launches where the ranks could not agree by sums
            if self._mine is None:
                self._total, self._all_double = with_rows.total, with_rows.all_double
        elif local or not self.host_reads():
            gradients.finish(meanwhile=launch)
        elif (total := gradients.finish(self._read)) is not None:
            self._total = torch.tensor(total, dtype=torch.float64, device="cpu")

    def host_reads(self) -> bool:
        """Whether this rank's squares can travel with the words of the ranks. Elsewhere they would make the host wait
        for the device.
        """
        run = self._runtime
        if run.ranks.size == 1 or run.ranks.group not in run.norm_groups:
            return False
        return self._device.type == "cpu" or (run.checks_overflow and self._device.type != "mps")

    def norm(self, grad_scale: float, *, needed: bool, local: bool) -> torch.Tensor:
        """L2 norm of the unscaled gradients that the ranks hold together; at stage 0 of what this rank holds, which
        is everything. Where gradients stay each rank's own, replicas do not count, and stages of a pipeline do. It is
        on the host if that knows it already, else on the device.
        """
        run = self._runtime
        if not needed:
            return torch.zeros((), device="cpu")
        groups = [group for group in run.norm_groups if not local or group != run.ranks.group]
        if self._total is None:
            total, all_double = self._mine or self._squares(groups, whole=run.stage == 0 and not local)
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
            return sum_of_squares(
                self._runtime.gradients.reductions.norms(), device=self._device, alone=not groups, whole=whole
            )

        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        return self._failure.run(squares, (torch.zeros((), dtype=dtype, device=self._device), False))

    def _squares_to_add_up(self) -> tuple[torch.Tensor, bool]:
        """This rank's part of the squares that are added up over `Runtime.norm_groups`."""
        return self._squares(self._runtime.norm_groups, whole=self._runtime.stage == 0)

    def _launch(self) -> None:
        """Start computing this rank's part of the square of the norm on the device. The words of the other ranks travel
        while the host launches it.
        """
        self._mine = self._squares_to_add_up()

    def _read(self) -> float:
        """This rank's part of the square of the norm, on the host."""
        squares, self._all_double = self._squares_to_add_up()
        return squares.item()


def usual_factor(grad_scale: float, max_norm: float | None, *, on_host: bool) -> float:
    """The result of `clip_factor` where the norm is at most `max_norm`, bitwise. `on_host`: the norm is on the host."""
    factor = 1.0 / grad_scale if grad_scale else math.inf
    return factor if on_host or not max_norm else torch.tensor(factor, dtype=torch.float32, device="cpu").item()


def clip_factor(norm: torch.Tensor, grad_scale: float, max_norm: float | None) -> float | torch.Tensor:
    """The factor that gradients are multiplied with. A number on the host's device, a tensor elsewhere (no waiting)."""
    if not max_norm:
        return 1.0 / grad_scale
    if norm.device.type == "cpu":
        value = norm.item()
        # `min` of a NaN is order-dependent; a NaN norm must show in the parameters, as in plain PyTorch.
        clip = max_norm / (value + _CLIP_EPSILON)
        return (clip if clip < 1.0 or clip != clip else 1.0) / grad_scale
    return ((max_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0) / grad_scale).to(torch.float32)
