"""Two levels of ranks: those of one node, and those that have the same place in theirs.

Rank r of the group is device r % D of node r // D, with D devices per node, as launchers number ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from ..errors import CommArgumentError
from ..groups import get_all_ranks_from_group, member, new_group
from ..step_lane import StepLane


@dataclass(frozen=True)
class Hierarchy:
    """This rank's place and groups.

    Attributes:
        group: all ranks.
        intra: the ranks of this node, in order; None where a node has one rank.
        inter: the ranks of this device number, one per node, in order; None with one node.
        nodes, devices: how many nodes, and ranks per node.
        node, device: this rank's.
        lane: where asynchronous calls on `intra` and `inter` go on by themselves. These two groups are its alone: a
            collective of the caller's on one of them could come between, on some ranks earlier than on others.
    """

    group: Any
    intra: Any
    inter: Any
    nodes: int
    devices: int
    node: int
    device: int
    lane: StepLane = field(default_factory=StepLane, compare=False, repr=False)


def make_hierarchy(devices: int | None = None, group: Any = None) -> Hierarchy:
    """Divide a group into nodes of `devices` ranks (collective over the group).

    Args:
        devices: ranks per node; None: LOCAL_WORLD_SIZE, which launchers set.
        group: the ranks to divide; None: all.

    Raises:
        CommArgumentError: unknown number of devices, or one that does not divide the group.
    """
    to = member(group)
    if devices is None:
        found = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not found.isdigit():
            raise CommArgumentError(f"make_hierarchy: LOCAL_WORLD_SIZE is {found!r}; give devices (ranks per node)")
        devices = int(found)
    if devices < 1 or to.size % devices:
        raise CommArgumentError(
            f"make_hierarchy: got {devices} devices per node, expected a divisor of {to.size} (ranks)"
        )
    ranks, nodes = get_all_ranks_from_group(to.group), to.size // devices
    node, device = divmod(to.rank, devices)
    row, column = ranks[node * devices : (node + 1) * devices], ranks[device::devices]
    # Disjoint groups may make theirs at the same time, so only the members meet.
    intra = new_group(row, local=True) if devices > 1 else None
    inter = new_group(column, local=True) if nodes > 1 else None
    return Hierarchy(to.group, intra, inter, nodes, devices, node, device)
