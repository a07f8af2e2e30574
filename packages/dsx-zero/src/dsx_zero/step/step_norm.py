"""How one step gets the norm of its gradients. While it does, the ranks agree that all of them are at their step.

There are two ways. Which one a step takes is the same on all ranks.

* Where the host reads the norm anyway (on a CPU, or for the check of overflow), this rank's sum of squares is one of
  the words that the ranks exchange (`order.agreed`).
* Elsewhere the host does not wait for the device: the squares are added up by an all-reduce on the device, and the host
  launches this rank's part while the words travel.

Left out: the arithmetic of norms (`norm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import dsx_comm
import torch

from ..runtime import Runtime
from .norm import CLIP_EPSILON, norm_of, sum_of_squares

__all__ = ["StepNorm", "clip_factor"]


class StepNorm:
    """The norm of the running step.

    Args:
        device: where the norm is computed.
    """

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self._runtime, self._device = runtime, device
        self._mine: tuple[torch.Tensor, bool] | None = None
        """This rank's part of the square of the norm, and whether all gradients are fp64; None where it was not
        computed before the ranks' words had arrived.
        """
        self._total: float | None = None
        """The squares of all data-parallel ranks, where the words had them."""

    def finish_gradients(self) -> None:
        """Complete the reductions of the step, and agree with the other ranks (collective)."""
        gradients, local = self._runtime.gradients, self._runtime.averaging.local()
        self._mine = None
        if self.host_reads():
            self._total = gradients.finish(self._read)
        else:
            self._total = gradients.finish(meanwhile=partial(self._launch, local=local))

    def host_reads(self) -> bool:
        """Whether this rank's squares can travel with what the ranks agree on at each step. Elsewhere they would make
        the host wait for the device.
        """
        run = self._runtime
        if run.ranks.size == 1 or run.averaging.local() or run.ranks.group not in run.norm_groups:
            return False
        return self._device.type == "cpu" or (run.checks_overflow and self._device.type != "mps")

    def norm(self, grad_scale: float, *, needed: bool) -> torch.Tensor:
        """L2 norm of the unscaled gradients that the ranks hold together; at stage 0 of what this rank holds, which
        is everything. Where gradients stay each rank's own, replicas do not count, and stages of a pipeline do.
        """
        run = self._runtime
        if not needed:
            return torch.zeros(())
        local = run.averaging.local()
        groups = [group for group in run.norm_groups if not local or group != run.ranks.group]
        mine, all_double = self._mine or self._squares(groups, whole=run.whole and not local)
        if self._total is not None:
            mine = torch.tensor(self._total, dtype=torch.float64, device=self._device)
            groups = [group for group in groups if group is not run.ranks.group]
        norm = norm_of(mine, groups, all_double=all_double)
        return norm if grad_scale == 1.0 else norm / grad_scale

    def sum_over_ranks(self, norm: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' own norms: not finite where one of them is not (collective)."""
        total = norm.clone()
        ranks = self._runtime.ranks
        if ranks.size > 1:
            dsx_comm.all_reduce(total, op=dsx_comm.ReduceOp.SUM, group=ranks.group)
        return total

    def _squares(self, groups: Sequence[Any], *, whole: bool) -> tuple[torch.Tensor, bool]:
        return sum_of_squares(self._runtime.gradients.norms(), device=self._device, alone=not groups, whole=whole)

    def _launch(self, *, local: bool) -> None:
        """Start computing this rank's part of the square of the norm on the device. The words of the other ranks travel
        while the host launches it.
        """
        if not local:
            self._mine = self._squares(self._runtime.norm_groups, whole=self._runtime.whole)

    def _read(self) -> float:
        """This rank's part of the square of the norm, on the host."""
        self._mine = self._squares(self._runtime.norm_groups, whole=self._runtime.whole)
        return self._mine[0].item()


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
