"""Warns when the norm of the gradients is not finite and the step goes on nevertheless, as in plain PyTorch.

There is one warning per run of such steps. It names the step, and the parameters and ranks that hold non-finite values.
Gradients are averaged by then, so the rank named is the one that owns the parameter's shard; the rank whose data caused
it is no longer known.

On a CUDA device the norm is copied to the host while the step goes on, and is looked at in a later step when it has
arrived: the host never waits. By then those gradients are gone, so that this warning names the step and no parameter.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import dsx_comm
import torch
from dsx_core import with_code
from dsx_core.device import Device

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["NonFiniteWarning"]

_log = logging.getLogger(__name__)

_CODE = "DSX353"
"""Of both warnings: the norm of the gradients is not finite."""

_MAX_NAMED = 3
_MOST_PENDING = 16
"""At most so many norms are on their way to the host; if the host runs further ahead of the device, the norms of those
steps are not looked at.
"""

_Arrival = Callable[[], float | None]
"""Returns a value when it has arrived on the host, and None before."""


def _send(norm: torch.Tensor) -> _Arrival | None:
    """Start copying a norm to the host. Returns None where the copy would make the host wait."""
    device = Device.of(norm)
    if not device.is_accelerator:
        return None
    host = torch.empty((), dtype=norm.dtype, pin_memory=True, device="cpu")
    host.copy_(norm, non_blocking=True)
    event = device.event()
    return lambda: host.item() if event is None or event.query() else None


class NonFiniteWarning:
    """Warns of one model's gradients. `send` copies a norm from a device to the host without waiting."""

    def __init__(self, send: Callable[[torch.Tensor], _Arrival | None] = _send) -> None:
        self._send = send
        self.steps = 0
        """Steps that went on so far, counted by the optimizer."""
        self._last = 0
        """The last of these whose norm was not finite."""
        self._arriving: deque[tuple[int, _Arrival]] = deque()

    def look(self, run: Runtime, norm: torch.Tensor, *, everywhere: bool) -> None:
        """Look at the norm of a step that goes on. Collective where the norm is on the host and not finite. A finite
        norm on the host need not be shown.

        Args:
            everywhere: whether all ranks have this norm; otherwise this rank warns of its own gradients.
        """
        if norm.device.type == "cpu":
            if self._has_become_nonfinite(self.steps, norm.item()):
                self._warn(run, norm.item(), everywhere)
            return
        speaks = not everywhere or run.ranks.rank == 0
        while speaks and self._arriving and (value := self._arriving[0][1]()) is not None:
            step, _ = self._arriving.popleft()
            if self._has_become_nonfinite(step, value):
                self._warn_late(step, value)
        if speaks and len(self._arriving) < _MOST_PENDING and (arrival := self._send(norm)) is not None:
            self._arriving.append((self.steps, arrival))

    def _has_become_nonfinite(self, step: int, norm: float) -> bool:
        """Is the norm of this step not finite, while that of the step before was?"""
        if math.isfinite(norm):
            return False
        known, self._last = self._last == step - 1 > 0, step
        return not known

    def _warn_late(self, step: int, norm: float) -> None:
        text = (
            "step %d: the norm of the gradients was not finite (%s), as the host has learned in step %d without waiting"
            " for the device. The step went on, as in plain PyTorch; with clipping what is not finite has spread to all"
            " parameters. Precision(check_overflow=True) skips such steps"
        )
        _log.warning(
            with_code(text, _CODE),
            step,
            norm,
            self.steps,
        )

    def _warn(self, run: Runtime, norm: float, everywhere: bool) -> None:
        names = _found(run)
        # each rank sends as many names as are ever named: in a large job all ranks may hold thousands of them
        mine = names[:_MAX_NAMED], len(names)
        by_rank: list[tuple[list[str], int]] = [mine]
        if everywhere and run.ranks.size > 1 and (run.norm_groups or run.stage > 0):
            by_rank = [mine] * run.ranks.size
            dsx_comm.all_gather_object(by_rank, mine, group=run.ranks.group)
        if everywhere and run.ranks.rank:
            return
        ranks = range(run.ranks.size) if len(by_rank) > 1 else [run.ranks.rank]
        places = [f"'{name}' on rank {rank}" for rank, (first, _) in zip(ranks, by_rank) for name in first]
        if places:
            count = sum(found for _, found in by_rank)
            more = f" and {count - _MAX_NAMED} more" if count > _MAX_NAMED else ""
            where = (
                f"not finite are {', '.join(places[:_MAX_NAMED])}{more}; with clipping they spread to all parameters"
            )
        else:
            where = "every gradient is finite, but their squares are beyond fp32: with clipping all become zero"
        text = (
            "step %d: the norm of the gradients is not finite (%s): %s. The step goes on, as in plain PyTorch; "
            "Precision(check_overflow=True) skips such steps"
        )
        _log.warning(
            with_code(text, _CODE),
            self.steps,
            norm,
            where,
        )


def _found(run: Runtime) -> list[str]:
    """The parameters in whose averaged gradient this rank holds a value that is not finite."""
    found = []
    for unit in run.trainable_units():
        for group in unit.trainable:
            pieces = run.gradients.reductions.parts(group, group.parts)
            values = [piece._values() if piece.is_sparse else piece for piece in pieces]
            found += [p.name for p, piece in zip(group.parts, values) if not torch.isfinite(piece).all().item()]
    return found
