"""The process groups of hybrid parallelism (data, model, experts) by name, for code that has no `GroupRegistry`.

    parallel_groups.use(GroupRegistry(ProcessTopology(("data", "sequence"), (4, 2))))
    get_data_parallel_group(), get_sequence_parallel_rank(), get_sequence_data_parallel_world_size()

The names are those of `deepspeed.utils.groups` without the underscore that most of them begin with there
(`dsx.utils.groups` has both). They give the groups of one `ParallelGroups` per process: that of the latest
`use`; without one, plain data parallelism over all ranks.

Ranks and sizes are arithmetic. A group is made the first time it is asked for: all ranks of the world ask for the same
groups, in the same order. An axis that the topology does not have has one rank. Left out: device meshes
(`GroupRegistry.device_mesh`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

from .errors import TopologyError
from .groups import get_rank, get_world_group, get_world_size
from .mpu import MpuGroups, read_mpu
from .registry import AxisGroup, GroupRegistry
from .topology import ProcessTopology

_AXES = {"sequence_data": ("data", "sequence"), "tensor": ("model",)}  # kinds that are not the axis of their name
_INSTEAD = {"sequence_data": "data", "tensor": "model"}  # of an mpu that does not tell the first


class ParallelGroups:
    """The groups of one process.

    Args:
        source: a registry, or a Megatron-style `mpu` object, whose groups are taken as they are when they are first
            asked for; None: one data axis over all ranks.
    """

    def __init__(self, source: Any = None) -> None:
        is_mpu = source is not None and not isinstance(source, GroupRegistry)
        self._registry: GroupRegistry | None = None if is_mpu else source or GroupRegistry()
        self._source = source if is_mpu else None
        self._experts: dict[str, tuple[AxisGroup, AxisGroup]] = {}
        self._blocks: AxisGroup | None = None

    def speaks_of(self, source: Any) -> bool:
        """Whether this is the registry or mpu that these groups come from."""
        return source is self._source or source is self._registry

    @cached_property
    def _mpu(self) -> MpuGroups | None:
        return None if self._source is None else read_mpu(self._source)

    def axis(self, kind: str) -> AxisGroup:
        """This rank's group of a kind: "data", "model", "tensor", "pipe", "sequence", "sequence_data".

        Raises:
            TopologyError: the mpu has no such group.
        """
        if self._mpu is None:
            return self.registry.axis(*_AXES.get(kind, (kind,)))
        found = self._of_mpu(self._mpu, kind)
        if found is None:
            raise TopologyError(
                f"the mpu has no {kind.replace('_', '-')}-parallel group; its get_{kind}_parallel_group() "
                "is missing or None"
            )
        return found

    @staticmethod
    def _of_mpu(mpu: MpuGroups, kind: str) -> AxisGroup | None:
        return getattr(mpu, kind) or (getattr(mpu, _INSTEAD[kind]) if kind in _INSTEAD else None)

    def size(self, kind: str) -> int:
        """The number of ranks in `axis(kind)`."""
        return self._placed(kind)[0]

    def rank(self, kind: str) -> int:
        """This rank's place in `axis(kind)`."""
        return self._placed(kind)[1]

    def _placed(self, kind: str) -> tuple[int, int]:
        """(size, rank), without making a group."""
        if self._mpu is not None:
            found = self._of_mpu(self._mpu, kind)
            return (1, 0) if found is None else (found.size, found.rank)
        topology, me = self.registry.topology, get_rank()
        axes = [axis for axis in topology.axes if axis in _AXES.get(kind, (kind,))]
        size = place = 0
        for axis in axes:
            size = (size or 1) * topology.get_dim(axis)
            place = place * topology.get_dim(axis) + getattr(topology.get_coord(me), axis)
        return size or 1, place

    @property
    def registry(self) -> GroupRegistry:
        """The registry; over an mpu one of data and model ranks, made for what an mpu does not tell (experts, blocks).

        Raises:
            TopologyError: the mpu's model-parallel groups are not of neighbours.
        """
        if self._registry is None:
            model, world = self.size("model"), get_world_size()
            topology = ProcessTopology(("data", "model"), (world // model, model))
            mine = next(ranks for ranks in topology.get_axis_comm_lists("model") if get_rank() in ranks)
            if mine != sorted(self.axis("model").ranks):
                raise TopologyError(
                    f"the mpu's model-parallel group is {list(self.axis('model').ranks)}, expected "
                    f"neighbours: {mine}; use a GroupRegistry"
                )
            self._registry = GroupRegistry(topology)
        return self._registry

    # - experts

    def create_experts(self, size: int, *, data_before_expert: bool = False) -> None:
        """Make the groups of experts that are spread over `size` ranks, under the name "ep_size_{size}"
        (collective).
        """
        name = f"ep_size_{size}"
        if name not in self._experts:
            self._experts[name] = self.registry.expert(size, data_before_expert=data_before_expert)

    def expert(self, name: str) -> AxisGroup:
        """The expert-parallel group of a name."""
        return self._expert(name)[0]

    def expert_data(self, name: str) -> AxisGroup:
        """The group of the ranks that hold the same experts."""
        return self._expert(name)[1]

    def _expert(self, name: str) -> tuple[AxisGroup, AxisGroup]:
        if name not in self._experts:
            known = ", ".join(self._experts) or "none"
            raise TopologyError(
                f"got the expert group {name!r}, expected one of those made so far: {known}; "
                "create_expert_and_data_parallel makes them"
            )
        return self._experts[name]

    def expert_names(self) -> list[str]:
        """The names of the expert groups made so far, the largest last."""
        return sorted(self._experts, key=lambda name: self._experts[name][0].size)

    # - blocks of neighbours

    def create_blocks(self, size: int) -> None:
        """Make the groups of `size` consecutive ranks that share secondary shards of parameters (collective)."""
        self._blocks = self.registry.blocks(size)

    @property
    def blocks(self) -> AxisGroup | None:
        """The block of this rank; None before `create_blocks`."""
        return self._blocks


class _Current:
    """The groups that the functions of this module speak of, as long as their world lasts: the last of those in use."""

    def __init__(self) -> None:
        self._world: Any = None
        self._in_use: list[ParallelGroups] = []
        self._holders: Counter[int] = Counter()

    def put(self, groups: ParallelGroups) -> None:
        if self._world is not get_world_group():
            self.forget()
            self._world = get_world_group()
        self._in_use.append(groups)

    def get(self) -> ParallelGroups:
        if not self._in_use or self._world is not get_world_group():
            self.put(ParallelGroups())
        return self._in_use[-1]

    def hold(self, groups: ParallelGroups) -> None:
        self._holders[id(groups)] += 1

    def let_go(self, groups: ParallelGroups) -> None:
        if any(groups is one for one in self._in_use):
            self._holders[id(groups)] -= 1
            if self._holders[id(groups)] <= 0:
                self._in_use = [one for one in self._in_use if one is not groups]

    def forget(self) -> None:
        self._world, self._in_use = None, []
        self._holders.clear()


_CURRENT = _Current()


def use(source: Any = None) -> ParallelGroups:
    """From now on the functions of this module speak of `source`: a `GroupRegistry`, an mpu, or None for plain data
    parallelism.
    """
    groups = _taken(source)
    _CURRENT.hold(groups)  # nobody lets it go
    return groups


def _taken(source: Any) -> ParallelGroups:
    groups = _CURRENT.get() if source is not None else None
    if groups is None or not groups.speaks_of(source):  # else groups that were made since are kept
        groups = ParallelGroups(source)
        _CURRENT.put(groups)
    return groups


def current() -> ParallelGroups:
    """What the functions of this module speak of."""
    return _CURRENT.get()


def hold(source: Any) -> Callable[[], None]:
    """`use(source)` until the function that is returned is called, on behalf of one of perhaps several holders.

    With the last holder's call the functions of this module speak again of what was in use before, unless another
    source has been given to `use` since. So what is built behind it is not divided over the groups of something that is
    gone. Calling the function again does nothing.
    """
    groups = _taken(source)
    _CURRENT.hold(groups)
    left = [groups]

    def let_go() -> None:
        while left:
            _CURRENT.let_go(left.pop())

    return let_go


def forget() -> None:
    """The world that these groups are of is gone."""
    _CURRENT.forget()


# - data, model, sequence


def get_data_parallel_group() -> Any:
    """The group over which gradients of one model are averaged (with sequence parallelism: without the sequence
    axis).
    """
    return current().axis("data").group


def get_data_parallel_rank() -> int:
    """This rank's place in the data-parallel group."""
    return current().rank("data")


def get_data_parallel_world_size() -> int:
    """Number of data-parallel ranks."""
    return current().size("data")


def get_model_parallel_group() -> Any:
    """The group of the ranks that hold slices of the same tensors."""
    return current().axis("model").group


def get_model_parallel_rank() -> int:
    """This rank's place in the model-parallel group."""
    return current().rank("model")


def get_model_parallel_world_size() -> int:
    """Number of model-parallel ranks."""
    return current().size("model")


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first member of this rank's model-parallel group."""
    return current().axis("model").ranks[0]


get_tensor_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size


def get_sequence_parallel_group() -> Any:
    """The group of the ranks that hold parts of the same sequences."""
    return current().axis("sequence").group


def get_sequence_parallel_rank() -> int:
    """This rank's place in the sequence-parallel group."""
    return current().rank("sequence")


def get_sequence_parallel_world_size() -> int:
    """Number of sequence-parallel ranks."""
    return current().size("sequence")


def get_sequence_data_parallel_group() -> Any:
    """The group of data and sequence axes together: over it gradients are averaged and ZeRO shards."""
    return current().axis("sequence_data").group


def get_sequence_data_parallel_rank() -> int:
    """This rank's place in the sequence-data-parallel group."""
    return current().rank("sequence_data")


def get_sequence_data_parallel_world_size() -> int:
    """Number of data-parallel times sequence-parallel ranks."""
    return current().size("sequence_data")


def get_broadcast_src_rank() -> int:
    """The global rank whose parameters all ranks of this rank's sequence-data-parallel group take."""
    return current().axis("sequence_data").ranks[0]


# - experts


def create_expert_and_data_parallel(expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False) -> None:
    """Make the groups of experts over `expert_parallel_size_` ranks, named "ep_size_{n}" (collective; a second call
    does nothing).
    """
    current().create_experts(expert_parallel_size_, data_before_expert=use_data_before_expert_parallel_)


def create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: Any, use_data_before_expert_parallel_: bool = False
) -> None:
    """As `create_expert_and_data_parallel` beside model parallelism, whose groups `mpu` knows and which are used from
    now on.
    """
    use(mpu)
    create_expert_and_data_parallel(expert_parallel_size_, use_data_before_expert_parallel_)


def get_expert_parallel_group(group_name: str) -> Any:
    """The group of the ranks that share the experts out, by name ("ep_size_4")."""
    return current().expert(group_name).group


def get_expert_parallel_rank(group_name: str) -> int:
    """This rank's place in an expert-parallel group."""
    return current().expert(group_name).rank


def get_expert_parallel_world_size(group_name: str) -> int:
    """Number of ranks in an expert-parallel group."""
    return current().expert(group_name).size


def get_expert_parallel_src_rank(group_name: str) -> int:
    """The global rank of the first member of an expert-parallel group."""
    return current().expert(group_name).ranks[0]


def get_expert_parallel_group_dict() -> dict[str, Any]:
    """This rank's expert-parallel groups by name."""
    groups = current()
    return {name: groups.expert(name).group for name in groups.expert_names()}


def get_expert_data_parallel_group(group_name: str) -> Any:
    """The group of the ranks that hold the same experts, by the name of the expert-parallel group."""
    return current().expert_data(group_name).group


def get_expert_data_parallel_rank(group_name: str) -> int:
    """This rank's place in an expert-data-parallel group."""
    return current().expert_data(group_name).rank


def get_expert_data_parallel_world_size(group_name: str) -> int:
    """Number of ranks that hold the same experts."""
    return current().expert_data(group_name).size


def get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """This rank's expert-data-parallel groups by name."""
    groups = current()
    return {name: groups.expert_data(name).group for name in groups.expert_names()}


def get_expert_broadcast_src_rank(group_name: str) -> int:
    """The global rank whose experts all ranks of this rank's expert-data-parallel group take."""
    return current().expert_data(group_name).ranks[0]


def get_expert_model_parallel_world_size() -> int:
    """Number of ranks that hold slices of one expert: the model-parallel ones."""
    return get_model_parallel_world_size()


def get_max_expert_size() -> int:
    """The largest number of ranks that experts are spread over.

    Raises:
        TopologyError: there are no expert groups yet.
    """
    return current().expert(get_max_expert_size_name()).size


def get_max_expert_size_name() -> str:
    """The name of the largest expert-parallel group. Raises `TopologyError` without one."""
    names = current().expert_names()
    if not names:
        raise TopologyError("there are no expert groups yet: create_expert_and_data_parallel makes them")
    return names[-1]


def get_max_expert_parallel_group() -> Any:
    """The largest expert-parallel group. Raises `TopologyError` without one."""
    return get_expert_parallel_group(get_max_expert_size_name())


# - nodes, secondary shards, all ranks


def get_local_all_to_all_group(devices: int | None = None) -> dict[str, Any]:
    """Groups for an all-to-all in two hops: "local_i" is node i, "global_j" device j of every node (see
    `GroupRegistry`).

    Args:
        devices: ranks per node; None: LOCAL_WORLD_SIZE, which launchers set, else all ranks.
    """
    if devices is None:
        found = os.environ.get("LOCAL_WORLD_SIZE", "")
        devices = int(found) if found.isdigit() and int(found) else get_world_size()
    return current().registry.local_all_to_all(devices)


def create_zero_param_parallel_group(group_size: int) -> None:
    """Make blocks of `group_size` consecutive ranks, which hold secondary shards of parameters (hpZ; collective)."""
    current().create_blocks(group_size)


def zero_param_parallel_is_initialized() -> bool:
    """Whether `create_zero_param_parallel_group` was called."""
    return current().blocks is not None


def get_zero_param_intra_parallel_group() -> Any:
    """This rank's block; None before `create_zero_param_parallel_group`."""
    return _of_block(lambda block: block.group, None)


def get_zero_param_intra_parallel_rank_in_mygroup() -> int:
    """This rank's place in its block; 0 without blocks."""
    return _of_block(lambda block: block.rank, 0)


def get_zero_param_intra_parallel_group_world_size() -> int:
    """Number of ranks in a block; 1 without blocks."""
    return _of_block(lambda block: block.size, 1)


def get_zero_param_intra_parallel_group_ranks() -> list[int]:
    """The global ranks of this rank's block; this rank alone without blocks."""
    return _of_block(lambda block: list(block.ranks), [get_rank()])


def _of_block(of: Callable[[AxisGroup], Any], otherwise: Any) -> Any:
    block = current().blocks
    return otherwise if block is None else of(block)


def clone_world_group() -> Any:
    """The group of all ranks. DeepSpeed copies it; here it is the default group itself."""
    return get_world_group()
