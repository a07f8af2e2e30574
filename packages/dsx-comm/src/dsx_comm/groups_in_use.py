"""`ParallelGroups`: the process groups of hybrid parallelism of one registry or mpu, and which of them are meant now.

The functions of `parallel_groups` speak of the `current` groups, which are those of the latest `use` or `hold`. An
engine holds the groups of its `mpu` or pipeline while it lives. A model that is built beside it without an `mpu` takes
none of them: it takes those of the latest `use` (`given`), else plain data parallelism over all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

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

    Attributes:
        slices_experts: experts are slices over the tensor axis; else every rank of it has whole experts.
    """

    def __init__(self, source: Any = None) -> None:
        is_mpu = source is not None and not isinstance(source, GroupRegistry)
        self._registry: GroupRegistry | None = None if is_mpu else source or GroupRegistry()
        self._source = source if is_mpu else None
        self._experts: dict[str, tuple[AxisGroup, AxisGroup]] = {}
        self._blocks: AxisGroup | None = None
        self.slices_experts = False

    def is_outdated(self) -> bool:
        """Whether the mpu tells of other groups now than when it was asked first."""
        return "_mpu" in self.__dict__ and self._source is not None and read_mpu(self._source) != self._mpu

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
        """The registry; over an mpu one of pipe, data and model ranks, made for what an mpu does not tell (experts,
        blocks). Ranks that share sequences are data ranks in it.

        Raises:
            TopologyError: the mpu's ranks have another order: the slices of a stage are neighbours, then come its
                copies, then the next stage.
        """
        if self._registry is None:
            sizes = {"pipe": self.size("pipe"), "data": self.size("sequence_data"), "model": self.size("tensor")}
            if sizes["pipe"] * sizes["data"] * sizes["model"] != get_world_size():
                raise TopologyError(f"the mpu has {sizes} ranks, the world has {get_world_size()}; use a GroupRegistry")
            topology = ProcessTopology(tuple(sizes), tuple(sizes.values()))
            for axis, kind in (("model", "tensor"), ("data", "sequence_data"), ("pipe", "pipe")):
                mine = next((r for r in topology.get_axis_comm_lists(axis) if get_rank() in r), [])
                if sizes[axis] > 1 and mine != sorted(self.axis(kind).ranks):
                    raise TopologyError(
                        f"the mpu's {axis}-parallel group is {list(self.axis(kind).ranks)}, expected"
                        f"{' neighbours:' if axis == 'model' else ''} {mine}; use a GroupRegistry"
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
        if name == "ep_size_1" and self._mpu is not None and self.size("pipe") == 1:
            self.create_experts(1)  # every rank has all experts, whatever groups its layers were built under
        if name not in self._experts:
            known = ", ".join(self._experts) or "none"
            raise TopologyError(
                f"got the expert group {name!r}, expected one of those made so far: {known};"
                " create_expert_and_data_parallel makes them. Beside an mpu call"
                " create_expert_data_and_model_parallel(expert_parallel_size_, mpu) before the layers are built"
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
        self._given: ParallelGroups | None = None
        self._speaking: list[ParallelGroups] = []
        self._known: WeakValueDictionary[int, ParallelGroups] = WeakValueDictionary()

    def _look_at_world(self) -> None:
        if self._world is not get_world_group():
            self.forget()
            self._world = get_world_group()

    def of(self, source: Any) -> ParallelGroups:
        """The groups of a source; those that something uses already have the expert groups that were made since."""
        self._look_at_world()
        if source is None:
            return ParallelGroups()
        found = self._known.get(id(source))
        if found is None or found.is_outdated():
            found = self._known[id(source)] = ParallelGroups(source)
        return found

    def get(self) -> ParallelGroups:
        self._look_at_world()
        if self._speaking or not self._in_use:
            return self.given()
        return self._in_use[-1]

    def given(self) -> ParallelGroups:
        self._look_at_world()
        if self._speaking:
            return self._speaking[-1]
        if self._given is None:
            self._given = ParallelGroups()
        return self._given

    def give(self, groups: ParallelGroups) -> None:
        self._given = groups
        self.hold(groups)  # nothing lets it go

    def hold(self, groups: ParallelGroups) -> None:
        if not self.holds(groups) or self._in_use[-1] is not groups:
            self._in_use = [*(one for one in self._in_use if one is not groups), groups]
        self._holders[id(groups)] += 1

    def holds(self, groups: ParallelGroups) -> bool:
        return any(groups is one for one in self._in_use)

    def let_go(self, groups: ParallelGroups) -> None:
        if self.holds(groups):
            self._holders[id(groups)] -= 1
            if self._holders[id(groups)] <= 0:
                self._in_use = [one for one in self._in_use if one is not groups]

    @contextmanager
    def speaking_of(self, groups: ParallelGroups) -> Iterator[None]:
        self._speaking.append(groups)
        try:
            yield
        finally:
            if groups in self._speaking:  # else the world has ended inside
                self._speaking.remove(groups)

    def forget(self) -> None:
        self._world, self._in_use, self._given, self._speaking = None, [], None, []
        self._holders.clear()
        self._known.clear()


_CURRENT = _Current()


def use(source: Any = None) -> ParallelGroups:
    """From now on the functions of this module speak of `source`: a `GroupRegistry`, an mpu, or None for plain data
    parallelism. Models that are built without an mpu take these groups (`given`).
    """
    groups = _CURRENT.of(source)
    _CURRENT.give(groups)
    return groups


def current() -> ParallelGroups:
    """The groups that the functions of this module use: those of the latest `use` or `hold`."""
    return _CURRENT.get()


def given() -> ParallelGroups:
    """The groups of a model that is built without an mpu: those of the latest `use`, else plain data parallelism over
    all ranks. What an engine only holds is not among them.
    """
    return _CURRENT.given()


def groups_of(source: Any) -> ParallelGroups:
    """The groups of a registry or an mpu, the same object as long as something uses it. Nothing speaks of them yet."""
    return _CURRENT.of(source)


def speaking_of(groups: ParallelGroups) -> Any:
    """A context in which `current` and `given` are these groups, for the building of one model."""
    return _CURRENT.speaking_of(groups)


def hold(source: Any) -> Callable[[], None]:
    """Speak of `source` until the function that is returned is called, on behalf of one of perhaps several holders.

    With the last holder's call the functions of this module speak again of what was in use before. `given` stays as it
    is: a model that is built beside the holder without an mpu is not divided over these groups. Calling the function
    again does nothing.
    """
    groups = _CURRENT.of(source)
    _CURRENT.hold(groups)
    left = [groups]

    def let_go() -> None:
        while left:
            _CURRENT.let_go(left.pop())

    return let_go


def is_in_use(groups: ParallelGroups) -> bool:
    """Whether `use` or `hold` was called for these groups, and not all holders have let them go."""
    return _CURRENT.holds(groups)


def forget() -> None:
    """The world that these groups are of is gone."""
    _CURRENT.forget()
