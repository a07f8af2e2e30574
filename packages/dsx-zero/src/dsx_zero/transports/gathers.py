"""Gathers that send the exact values."""

from __future__ import annotations

import dsx_comm
import torch
from dsx_comm.lanes import Pending

from ..params.flat import FlatGroup
from .protocol import Stateless

__all__ = ["PlainGather"]


class PlainGather(Stateless):
    """One all-gather over `RankSet.gather_group`, which is prepared once per flat group."""

    def __init__(self) -> None:
        self._prepared: dict[FlatGroup, dsx_comm.PreparedCollective] = {}

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        prepared = self._prepared.get(group)
        if prepared is None:
            ranks = group.ranks
            if ranks.size == 1:
                out.copy_(source)
                return None
            prepared = self._prepared[group] = dsx_comm.prepare_all_gather(
                group.layout.shard_numel, group.key.dtype, group.key.device, ranks.gather_group, label=label
            )
        return prepared.start(out, source)
