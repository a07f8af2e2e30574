"""The groups of one expert-parallel layout: ranks that divide the experts among them, and ranks with the same experts.

They come from the topology in use (`dsx_comm.parallel_groups`), under DeepSpeed's names ("ep_size_4"). So all layers
with the same expert-parallel size share them. Ranks that a launcher started join a process group first, so that layers
can be built before `dsx.initialize`. A process alone without a process group is one rank and has no groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dsx_comm
from dsx_comm import AxisGroup, Hierarchy, parallel_groups

from .errors import MoEConfigError
from .exchange import DirectExchange, Exchange, HierarchicalExchange

_ONE_RANK = AxisGroup(None, (0,), 0)


@dataclass(frozen=True)
class ExpertGroups:
    """This rank's groups for experts over `expert.size` ranks.

    Attributes:
        name: "ep_size_{n}", the `group_name` of expert parameters.
        expert: the ranks among which the experts are divided.
        expert_data: the ranks that hold the same experts as this one.
        data: the data-parallel ranks, over which a loss is averaged.
        data_before_expert: whether neighbouring ranks hold the same experts instead of different ones.
    """

    name: str
    expert: AxisGroup
    expert_data: AxisGroup
    data: AxisGroup
    data_before_expert: bool = False

    def __deepcopy__(self, memo: Any) -> ExpertGroups:
        return self  # copies of a layer communicate over the same groups

    def __reduce__(self) -> Any:
        return _unpickle_groups, (self.expert.size, self.data_before_expert)  # a process group cannot be pickled


def expert_group_name(ep_size: int) -> str:
    """The name of the groups of experts over `ep_size` ranks."""
    return f"ep_size_{ep_size}"


def expert_groups_of(ep_size: int, *, data_before_expert: bool = False) -> ExpertGroups:
    """The groups for experts over `ep_size` ranks. The first call makes them (collective over all ranks).

    Raises:
        MoEConfigError: `ep_size` is not 1 in a process alone without a process group, `ep_size` does not divide the
            ranks, or groups of this size exist in the other order.
    """
    name = expert_group_name(ep_size)
    dsx_comm.join_launched_ranks()
    if not dsx_comm.is_initialized():
        if ep_size != 1:
            raise MoEConfigError(
                f"ep_size: got {ep_size}, but there is one rank without a process group; call "
                "dsx_comm.init_distributed() first, or use ep_size=1"
            )
        return ExpertGroups(name, _ONE_RANK, _ONE_RANK, _ONE_RANK)
    current = parallel_groups.current()
    topology = current.registry.topology
    stage_ranks = dsx_comm.get_world_size() // topology.get_dim("pipe") // topology.get_dim("model")
    if ep_size < 1 or stage_ranks % ep_size:
        raise MoEConfigError(f"ep_size: got {ep_size}, expected a divisor of {stage_ranks} (data-parallel ranks)")
    current.create_experts(ep_size, data_before_expert=data_before_expert)
    made = ExpertGroups(
        name,
        current.expert(name),
        current.expert_data(name),
        current.axis("sequence_data"),
        data_before_expert,
    )
    _check_order(made)
    return made


def _unpickle_groups(ep_size: int, data_before_expert: bool) -> ExpertGroups:
    return expert_groups_of(ep_size, data_before_expert=data_before_expert)


def make_exchange(groups: ExpertGroups, devices_per_node: int | None = None) -> Exchange | None:
    """Make the exchange of an expert-parallel group; None if the group has one rank.

    Args:
        groups: from `expert_groups_of`.
        devices_per_node: number of consecutive ranks of the group that are on one node; rows are then sent in two hops,
            and the call is collective over all ranks. None: rows are sent directly.

    Raises:
        MoEConfigError: `devices_per_node` does not divide the group.
    """
    size = groups.expert.size
    if size == 1:
        return None
    if devices_per_node is None:
        return DirectExchange(groups.expert.group)
    if devices_per_node < 1 or size % devices_per_node:
        raise MoEConfigError(
            f"devices_per_node: got {devices_per_node}, expected a divisor of {size} (ranks of the expert group)"
        )
    return HierarchicalExchange(_hierarchy(groups, devices_per_node))


def _hierarchy(groups: ExpertGroups, devices: int) -> Hierarchy:
    """Divide every expert group into nodes of `devices` ranks. Every rank makes all groups, as torch requires."""
    nodes, (node, device) = groups.expert.size // devices, divmod(groups.expert.rank, devices)
    intra: Any = None
    inter: Any = None
    me = dsx_comm.get_rank()
    for ranks in _all_expert_groups(groups):
        rows = [ranks[i * devices : (i + 1) * devices] for i in range(nodes)]
        columns = [ranks[i::devices] for i in range(devices)]
        for row in rows if devices > 1 else ():
            made = dsx_comm.new_group(row, description="expert_intra")
            intra = made if me in row else intra
        for column in columns if nodes > 1 else ():
            made = dsx_comm.new_group(column, description="expert_inter")
            inter = made if me in column else inter
    return Hierarchy(groups.expert.group, intra, inter, nodes, devices, node, device)


def _all_expert_groups(groups: ExpertGroups) -> list[list[int]]:
    topology = parallel_groups.current().registry.topology
    expert, _ = dsx_comm.expert_groups(
        topology.world_size(),
        groups.expert.size,
        model_size=topology.get_dim("model"),
        pipe_size=topology.get_dim("pipe"),
        data_before_expert=groups.data_before_expert,
    )
    return expert


def _check_order(groups: ExpertGroups) -> None:
    """Raise an error if groups of this name exist in the other order: `create_experts` returns the existing groups."""
    expected = next(ranks for ranks in _all_expert_groups(groups) if dsx_comm.get_rank() in ranks)
    if list(groups.expert.ranks) != expected:
        raise MoEConfigError(
            f"the groups {groups.name!r} exist already with the ranks {list(groups.expert.ranks)}, expected "
            f"{expected}: "
            "use one value of use_data_before_expert_parallelism for all layers of a size"
        )
