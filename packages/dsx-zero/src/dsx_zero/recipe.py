"""`Recipe`: what was asked of `shard`; and `Planned`: one division of the model that follows from it.

`shard` plans once. `replanning` plans again, by the same recipe, when other parameters train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import dsx_comm
import torch
from torch import nn

from .alike import hash_of
from .grads.averaging import ByOptimizer, averaging_of
from .grads.reduction import Reduction
from .groups import AuxiliaryGroups
from .homes.chosen import check_room, place_units
from .homes.tiers import Placement, UnitPlacement
from .plan.rank_sets import check_rank_sets, is_plain
from .plan.units import ParameterInfo, Persistence, RanksOf, UnitPlan, plan_units
from .precision import Precision
from .step.masters import check_whole_tensors, needs_whole_tensors
from .transports.chosen import Transports

if TYPE_CHECKING:
    from .config import ZeroConfig

__all__ = ["Planned", "Recipe", "plan_facts"]


@dataclass(frozen=True)
class Recipe:
    """The arguments of `shard`, as they stay the same while a model is sharded.

    Attributes:
        data: all data-parallel ranks.
        ranks_of: which ranks share a parameter's buffer.
        ratio: part of the state that `placement` is for (Twin-Flow).
        device: where the model computes; None: where its parameters are.
        leaves: names of modules that are units of their own.
        bucket_size: elements of a unit at stages 1 and 2, and of a reduction.
        sparse: names of parameters whose gradients are rows.
    """

    model: nn.Module
    settings: ZeroConfig
    precision: Precision
    reduction: Reduction
    data: dsx_comm.RankSet
    ranks_of: RanksOf
    placement: Placement
    ratio: float
    device: torch.device | None
    leaves: frozenset[str]
    bucket_size: int
    transports: Transports
    groups: AuxiliaryGroups
    sparse: frozenset[str] = frozenset()

    def plan(self, infos: tuple[ParameterInfo, ...], inner: Any) -> Planned:
        """Units, owners and places for these parameters. Nothing is changed.

        Raises:
            ZeroConfigError: a disk's host buffers are too small.
            ZeroModelError, ZeroOptimizerError: rank sets or the optimizer do not go together with the settings.
        """
        settings = self.settings
        if self.device is not None:
            infos = tuple(replace(info, device=self.device) for info in infos)
        if self.sparse:
            infos = tuple(replace(info, sparse=info.name in self.sparse) for info in infos)
        plans = plan_units(
            self.model,
            infos,
            stage=settings.stage,
            ranks_of=self.ranks_of,
            reduce_bucket_size=self.bucket_size,
            persistence=Persistence(
                settings.size("stage3_param_persistence_threshold"), settings.stage3_model_persistence_threshold
            ),
            leaves=self.leaves,
            undivided=needs_whole_tensors(inner),
            block=getattr(inner, "state_block", 1),
        )
        check_rank_sets(plans, self.data)
        check_whole_tensors(inner, plans, self.model)
        check_room(self.placement, {str(p): _shard_numel(p) for p in plans if not p.resident})
        plain, stage, rank = is_plain(plans, self.data), settings.stage, self.data.rank
        averaging = averaging_of(inner, self.reduction, stage=stage, rank=rank, plain=plain)
        sizes = [(plan.index, str(plan), _shard_numel(plan)) for plan in plans]
        return Planned(infos, plans, averaging, place_units(sizes, self.placement, ratio=self.ratio))


@dataclass(frozen=True)
class Planned:
    """One division of a model: parameters, units, who averages, and where each unit's state lives."""

    infos: tuple[ParameterInfo, ...]
    plans: tuple[UnitPlan, ...]
    averaging: ByOptimizer | None
    placements: tuple[UnitPlacement, ...]

    @cached_property
    def _placed(self) -> dict[int, Placement]:
        return {record.unit: record.placement for record in self.placements}

    def placed(self, unit: int) -> Placement:
        """The place where the state of a unit lives."""
        return self._placed[unit]


def _shard_numel(plan: UnitPlan) -> int:
    return sum(group.layout.shard_numel for group in plan.groups)


def plan_facts(plans: Sequence[UnitPlan]) -> dict[str, str]:
    """The units, for `agree`: they depend on marks and on the hidden structure of modules too."""
    return {
        f"unit {plan.index}": (
            f"{plan.module or 'root'}, {len(plan.names)} parameters, {hash_of(plan.names)}"
            f" ({', '.join(str(group.key.ranks) for group in plan.groups)})"
        )
        for plan in plans
    }
