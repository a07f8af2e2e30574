"""Says where gradients are when their norm is not finite and the step goes on all the same, as in plain PyTorch.

A warning once per run of such steps: the step, and the parameters and ranks that hold what is not finite. Gradients are
averaged by then, so that the rank is the one that owns the parameter's shard; whose data it came from is no longer
known.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import dsx_comm
import torch

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["NonFiniteWarning"]

_log = logging.getLogger(__name__)

_SHOWN = 3


class NonFiniteWarning:
    """Warns of one model's gradients."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._steps = 0
        self._warned = False

    def look(self, norm: torch.Tensor, *, everywhere: bool) -> None:
        """A step with gradients of this norm goes on. Collective where the norm is not finite.

        Args:
            norm: a norm on the host (others are not looked at: that would wait for the device).
            everywhere: whether all ranks have this norm; else this rank speaks for itself.
        """
        self._steps += 1
        if norm.device.type != "cpu":
            return
        value = norm.item()
        if math.isfinite(value):
            self._warned = False
        elif not self._warned:
            self._warned = True
            self._warn(value, everywhere)

    def _warn(self, norm: float, everywhere: bool) -> None:
        run, mine = self._runtime, self._found()
        everybody: list[Any] = [mine]
        if everywhere and run.ranks.size > 1 and (run.norm_groups or not run.whole):
            everybody = [None] * run.ranks.size
            dsx_comm.all_gather_object(everybody, mine, group=run.ranks.group)
        if everywhere and run.ranks.rank:
            return
        ranks = range(run.ranks.size) if len(everybody) > 1 else [run.ranks.rank]
        places = [f"'{name}' on rank {rank}" for rank, names in zip(ranks, everybody) for name in names]
        if places:
            more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
            where = f"not finite are {', '.join(places[:_SHOWN])}{more}; with clipping they spread to all parameters"
        else:
            where = "every gradient is finite, but their squares are beyond fp32: with clipping all become zero"
        _log.warning(
            "step %d: the norm of the gradients is not finite (%s): %s. The step goes on, as in plain PyTorch; "
            "Precision(check_overflow=True) skips such steps",
            self._steps,
            norm,
            where,
        )

    def _found(self) -> list[str]:
        """The parameters of whose averaged gradient this rank has something that is not finite."""
        run = self._runtime
        found = []
        for unit in run.trainable_units():
            for group in unit.trainable:
                pieces = run.gradients.parts(group, group.parts)
                found += [p.name for p, piece in zip(group.parts, pieces) if not torch.isfinite(piece).all().item()]
        return found
