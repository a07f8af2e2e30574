"""Finds the ranks of a set that are on the same node, and makes groups inside and across the nodes."""

from __future__ import annotations

import os

import dsx_comm

from ..groups import AuxiliaryGroups

__all__ = ["hierarchy_of", "ranks_per_node"]


def ranks_per_node(ranks: dsx_comm.RankSet) -> int:
    """The number of neighbouring ranks of a set on each node; 1 if nodes have different numbers of them.

    Launchers number ranks node by node and set LOCAL_WORLD_SIZE. Without that variable there is one node.
    """
    held = dsx_comm.get_all_ranks_from_group(ranks.group)
    found = os.environ.get("LOCAL_WORLD_SIZE", "")
    local = int(found) if found.isdigit() and int(found) else dsx_comm.get_world_size()
    nodes = [rank // local for rank in held]
    devices = nodes.count(nodes[0])
    blocks = [nodes[place] for place in range(0, len(nodes), devices)]
    return devices if nodes == [node for node in blocks for _ in range(devices)] and blocks == sorted(set(nodes)) else 1


def hierarchy_of(ranks: dsx_comm.RankSet, groups: AuxiliaryGroups, kind: str) -> dsx_comm.Hierarchy:
    """The nodes of a set of several ranks, with groups that nothing else uses (collective over the set).

    Args:
        groups: makes the groups.
        kind: use of the groups, for their names.
    """
    devices = ranks_per_node(ranks)
    nodes = ranks.size // devices
    node, device = divmod(ranks.rank, devices)
    inside = [node * devices + place for place in range(devices)]
    across = [place * devices + device for place in range(nodes)]
    return dsx_comm.Hierarchy(
        group=ranks.group,
        intra=groups.take_part(ranks, inside, f"{kind} inside nodes").group if devices > 1 else None,
        inter=groups.take_part(ranks, across, f"{kind} between nodes").group if nodes > 1 else None,
        nodes=nodes,
        devices=devices,
        node=node,
        device=device,
    )
