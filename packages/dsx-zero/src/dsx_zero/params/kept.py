"""The flat groups that a new layout of a sharded model keeps from the previous one.

Re-planning regroups the parameters inside units. A group with the same parameters, the same ranks and the same places
of its state stays the same object, with its memory, its masters and the hooks on its parameters. Nothing of it is
copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..plan.units import GroupPlan, UnitPlan
from .flat import FlatGroup
from .partitioned_unit import PartitionedUnit

__all__ = ["KeptGroups"]


@dataclass(frozen=True)
class KeptGroups:
    """The groups that stay, by their plans. Partitioned groups stay only as complete units."""

    groups: Mapping[GroupPlan, FlatGroup] = field(default_factory=dict)
    units: Mapping[tuple[GroupPlan, ...], PartitionedUnit] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        plans: Iterable[UnitPlan],
        groups: Mapping[GroupPlan, FlatGroup],
        units: Mapping[tuple[GroupPlan, ...], PartitionedUnit],
    ) -> KeptGroups:
        """The earlier `groups` and `units` that these plans contain too."""
        plans = list(plans)
        wanted = {group for plan in plans for group in plan.groups}
        kept = {plan.groups: units[plan.groups] for plan in plans if not plan.resident and plan.groups in units}
        partitioned = {id(group) for unit in units.values() for group in unit.groups}
        return cls({p: g for p, g in groups.items() if p in wanted and id(g) not in partitioned}, kept)

    def __contains__(self, group: FlatGroup) -> bool:
        held = [*self.groups.values(), *(group for unit in self.units.values() for group in unit.groups)]
        return any(group is one for one in held)
