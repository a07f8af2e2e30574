"""Publishing of new values at stages 0-2, where whole parameters are always in memory.

After a step at stages 1-2 each rank gathers the shards of the others.
"""

from __future__ import annotations

from typing import Any

import dsx_comm
import torch

from ..params.dtensors import is_dtensor
from ..params.flat import FlatGroup, Unit
from ..plan.layout import pieces

__all__ = ["Gathering", "Replicated", "broadcast_first"]


def broadcast_first(values: torch.Tensor, ranks: dsx_comm.RankSet) -> None:
    """Broadcast the values of the first of the ranks that hold them to the others (collective)."""
    if (ranks.size == 1 and ranks.copies is None) or not values.numel():
        return
    with torch.no_grad():
        values = values.to_local() if is_dtensor(values) else values  # type: ignore[operator]
        contiguous = values if values.is_contiguous() else values.contiguous()
        dsx_comm.broadcast(contiguous, dsx_comm.get_global_rank(ranks.holders, 0), group=ranks.holders)
        if contiguous is not values:
            values.copy_(contiguous)


class Replicated:
    """The publisher of stage 0 and of one rank: every rank has updated all parameters itself."""

    def publish(self, unit: Unit) -> None:
        """Nothing to do: the values are on every rank."""

    def finish(self) -> None:
        """Nothing to do: nothing was started."""

    def write(self, group: FlatGroup, index: int, whole: torch.Tensor) -> None:
        """Write into the parameter, of which the shard is a part."""
        with torch.no_grad():
            group.parameters[index].copy_(whole)

    def free_gathered(self) -> None:
        """Nothing to do: parameters are always whole."""

    def tensors(self) -> list[torch.Tensor]:
        """No tensors are kept."""
        return []

    def remove_hooks(self) -> None:
        """Nothing to do: there are no hooks."""


class Gathering(Replicated):
    """The publisher of stages 1-2: it gathers shards in place into the buffers of which the parameters are views.

    Args:
        bucket_size: most elements of one all-gather.
    """

    def __init__(self, bucket_size: int) -> None:
        self._bucket_size = bucket_size
        self._works: list[Any] = []

    def publish(self, unit: Unit) -> None:
        """Start to gather the unit. The gather runs while the next unit's low-precision copy is written."""
        with dsx_comm.unit(str(unit.plan)):
            self._start(unit)

    def _start(self, unit: Unit) -> None:
        for group in unit.trainable:
            if group.visible is None or group.ranks.size == 1:
                continue  # the next use gathers it, or this rank has all of it
            if group.layout.numel <= self._bucket_size:
                shard = group.shard_of(group.visible)
                work = dsx_comm.all_gather_into_tensor(group.visible, shard, group=group.ranks.group, async_op=True)
                self._works.append(work)
            else:
                self._in_pieces(group.visible, group.shard_of(group.visible), group.ranks)

    def finish(self) -> None:
        """Wait for all gathers."""
        works, self._works = self._works, []
        for work in works:
            if work is not None:
                work.wait()

    def _in_pieces(self, buffer: torch.Tensor, shard: torch.Tensor, ranks: dsx_comm.RankSet) -> None:
        """Gather columns of the (rank, element) matrix through a message buffer of constant size."""
        rows = buffer.view(ranks.size, -1)
        for start, stop in pieces(rows.shape[1], self._bucket_size // ranks.size):
            message = buffer.new_empty(ranks.size * (stop - start))
            dsx_comm.all_gather_into_tensor(message, shard[start:stop].clone(), group=ranks.group)
            rows[:, start:stop].copy_(message.view(ranks.size, -1))
