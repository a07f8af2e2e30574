"""Gathers that send less between nodes: secondary shards (hpZ) and gathers in two levels (MiCS).

With secondary shards the first gather after a change of the values goes over all ranks. Each rank keeps a part of the
result: 1/k of the buffer, where k is the number of ranks near it (`RankSet.near`, normally those of its node). Until
the next change, gathers, such as those of backward, go among these ranks only.
"""

from __future__ import annotations

from collections.abc import Mapping

import dsx_comm
import torch
from dsx_comm.lanes import Pending

from ..params.flat import FlatGroup
from .protocol import Stateless, Then, Transport

__all__ = ["HierarchicalGather", "SecondaryGather", "part_of"]


class SecondaryGather:
    """Gathers with secondary shards, for groups whose ranks have near ranks.

    Args:
        primary: gathers over all ranks.
    """

    def __init__(self, primary: Transport) -> None:
        self._primary = primary
        self._shards: dict[FlatGroup, torch.Tensor] = {}
        self._generation: dict[FlatGroup, int] = {}
        self._filling: dict[FlatGroup, Then] = {}
        self._prepared: dict[FlatGroup, dsx_comm.PreparedCollective] = {}

    def tensors(self) -> list[torch.Tensor]:
        """See `Transport.tensors`: the secondary shards."""
        return self._primary.tensors() + list(self._shards.values())

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`. Earlier gathers decide which shards are read, so all ranks choose the same."""
        near = group.ranks.near
        if near is None:
            return self._primary.start(out, source, group, label)
        if self._generation.get(group) != group.generation:
            self._generation[group] = group.generation
            filling = self._filling[group] = self._fill(out, source, group, label, near)
            return filling
        return self._read(out, group, label, near)

    def _read(self, out: torch.Tensor, group: FlatGroup, label: str, near: dsx_comm.RankSet) -> Pending:
        """Gather the secondary shards of the near ranks."""
        self.settle(group)
        prepared = self._prepared.get(group)
        if prepared is None:
            numel = group.layout.numel // near.size
            prepared = self._prepared[group] = dsx_comm.prepare_all_gather(
                numel, group.key.dtype, group.key.device, near.group, label=label
            )
        return prepared.start(out, self._shards[group])

    def settle(self, group: FlatGroup) -> None:
        """Wait until the group's secondary shard holds the values of its last gather."""
        filling = self._filling.pop(group, None)
        if filling is not None:
            filling.wait()

    def _fill(
        self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str, near: dsx_comm.RankSet
    ) -> Then:
        shard = self._shards.get(group)
        if shard is None:
            shard = self._shards[group] = out.new_empty(group.layout.numel // near.size)
        pending = self._primary.start(out, source, group, label)
        part = part_of(out, near.rank, near.size)
        return Then([pending], lambda: shard.copy_(part))


def part_of(out: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The part of rank `rank` in a 1-D buffer that is divided evenly among `size` ranks."""
    numel = out.numel() // size
    return out[rank * numel : (rank + 1) * numel]


class HierarchicalGather(Stateless):
    """Gathers between nodes first, then inside them.

    Args:
        plain: gathers for rank sets that are on one node.
        hierarchies: the nodes of each rank set that is on several nodes.
    """

    def __init__(self, plain: Transport, hierarchies: Mapping[dsx_comm.RankSet, dsx_comm.Hierarchy]) -> None:
        self._plain, self._hierarchies = plain, hierarchies

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        hierarchy = self._hierarchies.get(group.ranks)
        if hierarchy is None:
            return self._plain.start(out, source, group, label)
        with dsx_comm.unit(label):
            return dsx_comm.hierarchical_all_gather(out, source, hierarchy, async_op=True)
