"""The groups of one expert-parallel layout: ranks that divide the experts among them, and ranks with the same experts.

They come from the topology in use (`dsx_comm.parallel_groups`), under DeepSpeed's names ("ep_size_4"). So all layers
with the same expert-parallel size share them. Ranks that a launcher started join a process group first, so that layers
can be built before `dsx.initialize`. A process alone without a process group is one rank and has no groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dsx_comm
from dsx_comm import Hierarchy, parallel_groups
from dsx_comm.registry import AxisGroup
from torch import nn

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


def expert_groups_of(ep_size: int, *, data_before_expert: bool = False, slices_experts: bool = False) -> ExpertGroups:
    """The groups for experts over `ep_size` ranks. The first call makes them (collective over all ranks).

    `slices_experts` records that experts are slices over the tensor axis.

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
    given = parallel_groups.given()
    topology = given.registry.topology
    stage_ranks = dsx_comm.get_world_size() // topology.axis_size("pipe") // topology.axis_size("model")
    if ep_size < 1 or stage_ranks % ep_size:
        raise MoEConfigError(f"ep_size: got {ep_size}, expected a divisor of {stage_ranks} (data-parallel ranks)")
    given.create_experts(ep_size, data_before_expert=data_before_expert)
    given.slices_experts |= slices_experts
    made = ExpertGroups(
        name,
        given.expert(name),
        given.expert_data(name),
        given.axis("sequence_data"),
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
    """Divide every expert group into nodes of `devices` ranks. Every rank makes all groups; in a pipeline its own."""
    local = parallel_groups.given().registry.topology.axis_size("pipe") > 1  # another stage may have no experts
    nodes, (node, device) = groups.expert.size // devices, divmod(groups.expert.rank, devices)
    intra: Any = None
    inter: Any = None
    me = dsx_comm.get_rank()
    for ranks in [list(groups.expert.ranks)] if local else _all_expert_groups(groups):
        rows = [ranks[i * devices : (i + 1) * devices] for i in range(nodes)]
        columns = [ranks[i::devices] for i in range(devices)]
        for row in rows if devices > 1 else ():
            if local and me not in row:
                continue
            made = dsx_comm.new_group(row, description="expert_intra", local=local)
            intra = made if me in row else intra
        for column in columns if nodes > 1 else ():
            if local and me not in column:
                continue
            made = dsx_comm.new_group(column, description="expert_inter", local=local)
            inter = made if me in column else inter
    return Hierarchy(groups.expert.group, intra, inter, nodes, devices, node, device)


def _all_expert_groups(groups: ExpertGroups) -> list[list[int]]:
    topology = parallel_groups.given().registry.topology
    expert, _ = dsx_comm.topology.expert_groups(
        topology.world_size(),
        groups.expert.size,
        model_size=topology.axis_size("model"),
        pipe_size=topology.axis_size("pipe"),
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


def groups_in(model: nn.Module) -> dict[str, ExpertGroups]:
    """The groups of the expert layers of a model, by name.

    Raises:
        MoEConfigError: layers were built before there was a process group, or for different data-parallel ranks.
    """
    found: dict[str, ExpertGroups] = {}
    for name, module in model.named_modules():
        groups = getattr(getattr(module, "dispatch", None), "groups", None)
        if not isinstance(groups, ExpertGroups):
            continue
        first = found.setdefault(groups.name, groups)
        if (
            dsx_comm.is_initialized()
            and dsx_comm.get_world_size() > 1
            and (groups.data.group is None or groups.expert.ranks != first.expert.ranks)
        ):
            raise MoEConfigError(
                f"{name or 'the layer'}: its experts are over the ranks {list(groups.expert.ranks)}, expected"
                f" {list(first.expert.ranks)} of this process group; the layer was built before"
                " dsx_comm.init_distributed(), or the topology was changed since"
            )
    return found


def data_ranks(model: nn.Module) -> AxisGroup:
    """The data-parallel ranks of a model: those its expert layers were built for, else those given to
    `parallel_groups.use`.
    """
    found = next(iter(groups_in(model).values()), None)
    return parallel_groups.given().axis("sequence_data") if found is None else found.data


def check_groups(model: nn.Module) -> None:
    """Check that the layers of a model were built for the ranks that its engine will take.

    These are the ranks of `parallel_groups.given`.

    Raises:
        MoEConfigError: they were built for others. An expert's gradients would be averaged with those of other experts.
    """
    if not dsx_comm.is_initialized():
        return
    given = parallel_groups.given()
    for name, groups in groups_in(model).items():
        # The layer was built before there was a process group, or before an mpu was known. In the second case every
        # rank has all its experts, whatever groups it was built under. Stages of a pipeline may have none.
        whole = groups.expert.size == 1 and given.size("pipe") == 1
        if name not in given.expert_names() and (whole or dsx_comm.get_world_size() == 1):
            given.create_experts(groups.expert.size)
        expected = given.expert(name).ranks if name in given.expert_names() else None
        if expected != groups.expert.ranks:
            found = "no expert groups of this size" if expected is None else f"the ranks {list(expected)}"
            raise MoEConfigError(
                f"{name}: the layers were built for the expert-parallel ranks {list(groups.expert.ranks)}, and the"
                f" topology of this model has {found}; give dsx_comm.parallel_groups.use(...) the topology or mpu of"
                " the model before its layers are built"
            )
