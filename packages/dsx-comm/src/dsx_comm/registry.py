"""Process groups of a topology, each made once.

A group is made the first time it is asked for. Making one is collective: all ranks of the world ask for the same groups
in the same order (in practice at start-up). `build` makes a list of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import TopologyError
from .groups import get_rank, get_world_group, get_world_size, initialize_mesh_device, new_group
from .topology import AXES, ProcessTopology, block_groups, expert_groups


@dataclass(frozen=True)
class AxisGroup:
    """This rank's group along an axis: the process group, its global ranks, this rank's place in it."""

    group: Any
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


class GroupRegistry:
    """This rank's groups over a topology.

    Args:
        topology: the grid; its size must be the world size. Default: one axis "data" over all ranks.
    """

    def __init__(self, topology: ProcessTopology | None = None) -> None:
        world = get_world_size()
        self.topology = topology or ProcessTopology(("data",), (world,))
        if self.topology.world_size() != world:
            raise TopologyError(f"{self.topology} has {self.topology.world_size()} ranks, the world has {world}")
        self._groups: dict[Any, AxisGroup] = {}
        self._named: dict[Any, dict[str, Any]] = {}

    def axis(self, *axes: str) -> AxisGroup:
        """The group of ranks that differ from this one only in `axes` (several: their product, say data and sequence).

        Axes that the topology does not have have one rank; a group of such axes only is this rank alone. Raises
        `TopologyError` for a name that is no axis.
        """
        unknown = [a for a in axes if a not in self.topology.axes and a not in AXES]
        if unknown:
            raise TopologyError(f"unknown axis {unknown[0]!r}: {self.topology} has {', '.join(self.topology.axes)}")
        present = tuple(a for a in self.topology.axes if a in axes)
        lists = self.topology.get_axis_comm_lists(*present) or [[r] for r in range(self.topology.world_size())]
        return self._of(("axis", present), lists)

    def expert(self, size: int, *, data_before_expert: bool = False) -> tuple[AxisGroup, AxisGroup]:
        """(expert-parallel, expert-data-parallel) group for experts spread over `size` ranks of the data axis.

        In a pipeline only the ranks of this rank's stage need to ask: another stage may have no experts.
        """
        self._only("expert groups", ("pipe", "data", "model"))
        expert, expert_data = expert_groups(
            self.topology.world_size(),
            size,
            model_size=self.topology.axis_size("model"),
            pipe_size=self.topology.axis_size("pipe"),
            data_before_expert=data_before_expert,
        )
        key, local = (size, data_before_expert), self.topology.axis_size("pipe") > 1
        found = self._of(("expert", *key), expert, local=local)
        return found, self._of(("expert_data", *key), expert_data, local=local)

    def blocks(self, size: int) -> AxisGroup:
        """The block of `size` consecutive ranks that holds this one (hpZ: the ranks of one machine)."""
        return self._of(("blocks", size), block_groups(self.topology.world_size(), size))

    def local_all_to_all(self, devices: int) -> dict[str, Any]:
        """Process groups for an all-to-all in two hops, of nodes of `devices` consecutive ranks each.

        Returns:
            "local_i": the ranks of node i; "global_j": rank j of every node. All groups are there; this rank is a
            member of one of each kind.
        """
        rows = block_groups(self.topology.world_size(), devices)
        lists = {f"local_{i}": row for i, row in enumerate(rows)}
        lists.update({f"global_{j}": list(column) for j, column in enumerate(zip(*rows))})
        key = ("local_all_to_all", devices)
        if key not in self._named:
            self._named[key] = {name: new_group(ranks, description=name) for name, ranks in lists.items()}
        return dict(self._named[key])

    def build(self, *axes: str | Sequence[str]) -> None:
        """Make the groups of several axes now, in this order."""
        for axis in axes:
            self.axis(*((axis,) if isinstance(axis, str) else axis))

    def device_mesh(self, device_type: str | None = None) -> Any:
        """A torch DeviceMesh of the same shape and axis names."""
        return initialize_mesh_device(self.topology.dims, self.topology.axes, device_type)

    def _of(self, key: Any, lists: list[list[int]], *, local: bool = False) -> AxisGroup:
        if key not in self._groups:
            self._groups[key] = self._make(key, lists, local)
        return self._groups[key]

    def _make(self, key: Any, lists: list[list[int]], local: bool) -> AxisGroup:
        me = get_rank()
        mine = next(tuple(ranks) for ranks in lists if me in ranks)
        if len(lists) == 1 and list(mine) == list(range(get_world_size())):
            return AxisGroup(get_world_group(), mine, me)
        made = {
            tuple(ranks): new_group(ranks, description="_".join(map(str, key)), local=local)
            for ranks in lists
            if not local or me in ranks
        }
        return AxisGroup(made[mine], mine, mine.index(me))

    def _only(self, what: str, axes: tuple[str, ...]) -> None:
        grid = tuple(a for a in self.topology.axes if self.topology.axis_size(a) > 1)
        expected = tuple(a for a in axes if a in grid)
        if grid != expected:
            raise TopologyError(f"{what} need a topology of the axes {axes} in this order, got {self.topology}")
