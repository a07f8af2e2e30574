"""`StepParts`: all that a `ZeroOptimizer` steps with, made of a `Runtime` and the user's optimizer (`assemble`).

Masters take the places of the parameters in the optimizer, and the step gets its plan. This module does not depend on
`ZeroOptimizer`, which gets the parts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from dsx_comm.lanes import Lane
from dsx_core import with_code
from torch import nn

from .building import NOTHING_KEPT, Builder, Kept
from .errors import HAS_NO_EFFECT
from .grads.unused import UnusedParameters
from .homes.chosen import (
    late_update_after,
    makes_states_at_once,
    may_step_during_backward,
    room_for_copies,
    room_for_new_values,
    speculates,
    steps_during_backward,
    sub_group_size,
    transfers_beside_step,
)
from .homes.tiers import UnitPlacement
from .order.channel import AskingChannel, OneRank
from .params.flat import Unit
from .recipe import Planned, Recipe
from .runtime import Runtime
from .step.host_thread import new_values_wait
from .step.inner import StepGroups, may_be_cut, why_at_once
from .step.masters import Master, Masters, make_masters, place_masters
from .step.matrices import MatrixStep
from .step.plan import Pipeline, StepPlan
from .step.runner import plan_step
from .step.states import OptimizerStates

if TYPE_CHECKING:
    from .config import ZeroConfig


__all__ = ["StepParts", "assemble"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepParts:
    """Everything that a `ZeroOptimizer` steps with.

    Attributes:
        masters: what this rank steps, in layout order; `by_parameter`: every parameter that trains with its masters.
        groups: the optimizer's groups.
        faces: what the model holds between uses, for the `id` of each plain parameter that takes its place meanwhile.
        plan: of a step in which nothing is stepped beforehand; `apart_plan`: of the others.
        channel: carries the words of the order.
        agreement_group: adds norms up with what the ranks agree on; None: `channel` has all that they agree on.
        moving_lanes: those on which copies between tiers run.
        early_units: those that may be stepped while backward goes on; `undoable_units`: where that may have to be
            undone.
        late_after: steps after which updates are applied late; None: never.
        data_writes: whether `Edits` looks for writes that raise no version counter.
        matrices: steps the optimizer, if its rule takes whole matrices.
    """

    runtime: Runtime
    masters: tuple[Master, ...]
    by_parameter: Masters
    unused: UnusedParameters | None
    groups: StepGroups
    states: OptimizerStates
    placements: tuple[UnitPlacement, ...]
    plan: StepPlan
    apart_plan: StepPlan
    lane: Lane
    faces: Mapping[int, torch.Tensor]
    channel: AskingChannel
    agreement_group: Any = None
    moving_lanes: tuple[Lane, ...] = ()
    early_units: tuple[int, ...] = ()
    undoable_units: tuple[int, ...] = ()
    late_after: int | None = None
    data_writes: bool | None = None
    matrices: MatrixStep | None = None


def assemble(builder: Builder, planned: Planned, runtime: Runtime, inner: Any, kept: Kept = NOTHING_KEPT) -> StepParts:
    """Masters of everything that trains, in the places of the parameters in the optimizer, and the plan of its step."""
    recipe = builder.recipe
    for unit in runtime.trainable_units():
        for group in unit.trainable:
            if group.master is None:
                tier = planned.placed(unit.index).masters
                group.make_master(recipe.precision.master, whole=runtime.stage == 0, tier=tier)
    moves = any(record.placement.states is not None for record in planned.placements) or any(
        group.master is not None and group.master.view() is None for unit in runtime.units for group in unit.groups
    )
    most = sub_group_size(recipe.settings, moves=moves) if may_be_cut(inner) else None
    early, undoable = _early_units(recipe, planned, runtime, inner)
    masters = make_masters(runtime.units, whole=runtime.stage == 0, most=most, known=kept.masters)
    faces = _faces(recipe.model, runtime)
    shown: list[list[Any]] = [[faces.get(id(p), p) for p in group["params"]] for group in inner.param_groups]
    numbers = {id(p): number for number, group in enumerate(inner.param_groups) for p in group["params"]}
    place_masters(inner, masters, keep=kept.held)
    stepped = [master for _, pieces in masters for master in pieces]
    unit_of = {id(group): unit.index for unit in runtime.units for group in unit.groups}
    tiers = [planned.placed(unit_of[id(m.group)]).states for m in stepped]
    groups = StepGroups(inner, shown)
    states = OptimizerStates(inner, stepped, tiers, groups.numbers(), kept.earlier, recipe.placement.blocks)
    at_once = makes_states_at_once(recipe.settings)
    if at_once and not states.make_now() and recipe.data.rank == 0 and kept.earlier is None:
        _log.warning(
            with_code(
                "zero_optimization.offload_optimizer.fast_init has no effect: %s makes its states in its first step",
                HAS_NO_EFFECT,
            ),
            type(inner).__name__,
        )
    planned_step = partial(
        plan_step,
        inner,
        runtime,
        stepped,
        most=most,
        moves=moves,
        pipeline=Pipeline(*transfers_beside_step(recipe.settings)),
    )
    # Where states move, small sub-groups cost transfers: the usual step has large ones, which span units.
    apart_plan = planned_step(by_unit=bool(early or undoable))
    return StepParts(
        runtime=runtime,
        masters=tuple(stepped),
        by_parameter=masters,
        unused=_unused_check(runtime, recipe.settings),
        groups=groups,
        states=states,
        placements=planned.placements,
        plan=planned_step() if moves and (early or undoable) else apart_plan,
        apart_plan=apart_plan,
        lane=builder.lane,
        faces=faces,
        channel=builder.channel() or OneRank(),
        agreement_group=builder.agreement_group(runtime),
        moving_lanes=tuple(builder.moving_lanes.values()),
        early_units=early,
        undoable_units=undoable,
        late_after=late_update_after(recipe.settings),
        data_writes=recipe.settings.notice_data_writes,
        matrices=MatrixStep.of(inner, runtime, masters, numbers),
    )


def _early_units(
    recipe: Recipe, planned: Planned, runtime: Runtime, inner: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The units that may be stepped while backward goes on: where nothing has to be undone, and where something may
    have to. Units whose new values, or copies of whose old values, would not fit into their room in host memory are
    left out.
    """
    settings, none = recipe.settings, tuple[int, ...]()
    if why_at_once(inner) is not None or runtime.averaging is not None or not steps_during_backward(settings):
        return none, none
    units = [u for u in runtime.trainable_units() if may_step_during_backward(planned.placed(u.index))]
    waiting = {u.index: sum(group.stepped.numel for group in u.trainable if new_values_wait(group)) for u in units}
    room = room_for_new_values(settings, recipe.placement)
    surely = hasattr(inner, "step_flat") and not runtime.checks_overflow
    early = _that_fit(units, waiting, room) if surely else none
    if not speculates(settings, {group.key.device.type for unit in units for group in unit.trainable}):
        return early, none
    copied = {u.index: sum(group.stepped.numel for group in u.trainable) - waiting[u.index] for u in units}
    fit = set(_that_fit(units, waiting, room)).intersection(
        _that_fit(units, copied, room_for_copies(settings, sum(copied.values())))
    )
    return early, tuple(sorted(fit))


def _that_fit(units: Sequence[Unit], elements: Mapping[int, int], room: int) -> tuple[int, ...]:
    """The units whose elements have room together. Backward completes the last ones first."""
    found = list[int]()
    for unit in reversed(units):
        if elements[unit.index] <= room:
            room -= elements[unit.index]
            found.append(unit.index)
    return tuple(reversed(found))


def _faces(model: nn.Module, runtime: Runtime) -> dict[int, torch.Tensor]:
    """The parameters that the model holds between uses, by the `id` of the plain one that takes their place meanwhile
    (stage 3).
    """
    plain = {
        name: p
        for unit in runtime.units
        for group in unit.groups
        for name, p in zip(group.layout.names, group.parameters)
    }
    return {id(p): face for name, p in plain.items() if (face := model.get_parameter(name)) is not p}


def _unused_check(runtime: Runtime, settings: ZeroConfig) -> UnusedParameters | None:
    if settings.ignore_unused_parameters:
        return None
    return UnusedParameters(runtime.trainable_units(), runtime.ranks)
