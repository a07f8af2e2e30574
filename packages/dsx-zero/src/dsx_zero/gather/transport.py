"""How the shards of a flat group travel to the ranks that share it.

A transport knows whose buffer it carries, so that it can keep what belongs to a group: a collective made ready once,
scales of quantised values, a hierarchy of groups. It runs as a job of a lane, so decoding what has arrived belongs to
the `wait` of what `start` returns.

`PlainGather` sends the values as they are. Left out: where shards come from (`homes`), and when (`executor`).
"""

from __future__ import annotations

from typing import Protocol

import dsx_comm
import torch

from ..lanes import Pending
from ..params.flat import FlatGroup

__all__ = ["GatherTransport", "PlainGather"]


class GatherTransport(Protocol):
    """Carries shards."""

    def start(self, out: torch.Tensor, shard: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """Start gathering the ranks' shards of a group (collective over its rank set).

        Args:
            out: `group.layout.numel` elements, filled once the result has been waited for.
            shard: this rank's `group.layout.shard_numel` elements.
            group: whose values they are.
            label: what the gather is for, where a hang is explained.

        Returns:
            What to wait for; None when it is done.
        """
        ...


class PlainGather:
    """The values as they are, in one all-gather over `RankSet.gather_group`, made ready once per group."""

    def __init__(self) -> None:
        self._prepared: dict[FlatGroup, dsx_comm.PreparedCollective] = {}

    def start(self, out: torch.Tensor, shard: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `GatherTransport.start`."""
        ranks = group.ranks
        if ranks.size == 1:
            out.copy_(shard)
            return None
        prepared = self._prepared.get(group)
        if prepared is None:
            prepared = self._prepared[group] = dsx_comm.prepare_all_gather(
                group.layout.shard_numel, group.key.dtype, group.key.device, ranks.gather_group, label=label
            )
        return prepared.start(out, shard)
