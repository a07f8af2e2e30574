"""Re-planning in place: a sharded model gets a new layout because more parameters train than when it was sharded.

Parameters stay in their units. Inside a unit, trainable and frozen parameters are in different flat groups, so a
parameter that is trained from now on moves from one group to another. Groups that do not change stay the same objects
(`Kept`). Masters and optimizer states of the other groups move by name (`Moves`). Nothing is rounded.

First everything that can fail is done, and the ranks agree that they want the same (`Replanner.prepare`); then the
layout changes on all of them (`Prepared.carry_out`). Gradients do not move: there must be none that no step has
used. Left out are parameters that are new in the model, and optimizers that communicate by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from dsx_core.modules import CallingHook

from .alike import agree, optimizer_facts, telling
from .assembling import StepParts, assemble
from .building import Builder, Kept
from .errors import ZeroModelError, ZeroOptimizerError, ZeroStateError
from .grads.averaging import averages_itself
from .held import HeldState
from .homes.home import discard
from .params.flat import FlatGroup
from .params.kept import KeptGroups
from .params.partitioned_unit import is_partitioned
from .plan.units import ParameterInfo, find_parameters
from .recipe import Planned, plan_facts
from .runtime import Runtime
from .state.layout import ModelLayout
from .state.redividing import Moves
from .step.masters import Masters
from .step.model_check import Frozen
from .step.trial import check_divisible
from .torch_names import current_graph_task_id
from .transports.errors import carry_errors

__all__ = ["Prepared", "Replanner", "add_group"]

_CALL = "dsx_zero, changing the layout of the model (add_param_group, replan, or a parameter was unfrozen)"

_STALE = (
    "the model was given a new layout (add_param_group, replan, or a parameter was unfrozen) after the forward of this"
    " backward; expected a forward after the change: run the forward again"
)
_GONE = (
    "the gradients of the last step were dropped when the model was given a new layout, and this backward would have"
    " been added to them; call optimizer.zero_grad() after the step, as before any backward of a new update"
)


def add_group(inner: Any, param_group: dict[str, Any], layout: ModelLayout, run: Runtime) -> None:
    """Add a group to the user's optimizer; see `ZeroOptimizer.add_param_group`."""
    given = param_group.get("params") if isinstance(param_group, dict) else None
    group = dict(param_group)
    if given is not None and not isinstance(given, (torch.Tensor, set)):
        group["params"] = given = list(given)  # it may be a generator
    for place, entry in enumerate([given] if isinstance(given, torch.Tensor) else given or ()):
        parameter = entry[1] if isinstance(entry, tuple) else entry
        if isinstance(parameter, torch.Tensor) and id(parameter) not in layout.names:
            raise ZeroOptimizerError(
                f"add_param_group: params[{place}] (shape {tuple(parameter.shape)}) is not a parameter of the model"
                " that was sharded; expected tensors of model.parameters(). A layer that is new has to be in the"
                " model before dsx_zero.shard (or shard the model again, with a new optimizer)"
            )
    inner.add_param_group(group)
    check_divisible(inner, ranks=run.ranks.size if run.stage else 1)


def _replan_if_unfrozen(
    frozen: Frozen, replan: Callable[[], Callable[[], None] | None], module: Any, args: Any
) -> None:
    """Before a forward: if a parameter was unfrozen, change the layout of the model (collective then)."""
    if torch.is_grad_enabled() and current_graph_task_id() == -1 and frozen.unfrozen() and (call := replan()):
        call()


class Replanner:
    """Changes the layout of one model, by the recipe that it was sharded with."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._before_forward: Any = None

    def watch(self, model: torch.nn.Module, frozen: Frozen, replan: Callable[[], Callable[[], None] | None]) -> None:
        """Check before each forward of the model whether a parameter was unfrozen, where one can be.

        Args:
            replan: a weak reference to what changes the layout then.
        """
        self.stop_watching()
        if frozen.may_grow:
            hook = CallingHook(partial(_replan_if_unfrozen, frozen, replan))
            # Before the hooks that gather: the forward that is about to begin uses the new layout.
            self._before_forward = model.register_forward_pre_hook(hook, prepend=True)

    def stop_watching(self) -> None:
        """Look no more."""
        if self._before_forward is not None:
            self._before_forward.remove()
            self._before_forward = None

    def prepare(self, held: HeldState, change: Callable[[], None]) -> Prepared:
        """Plan for what trains after `change`, which changes the optimizer's groups, and agree on it with the other
        ranks (collective). If it fails, nothing is changed.

        Raises:
            RanksDifferError: the ranks want different things, or one of them has failed.
            ZeroModelError, ZeroOptimizerError, ZeroStateError: it cannot be.
        """
        inner: Any = held.parts.states.inner
        count = len(inner.param_groups)
        try:
            with telling(held.parts.runtime.ranks.group):
                held.update.check_in_use()
                _check(held.parts.runtime, inner)
                held.update.collect_edits()
                change()
            return self._agreed(held, inner, edits=held.update.agreement.of_all())
        except BaseException:
            del inner.param_groups[count:]
            raise

    def _agreed(self, held: HeldState, inner: Any, *, edits: str) -> Prepared:
        """`edits`: what users wrote into parameters since the last step; has to be equal on all ranks."""
        recipe, old = self._builder.recipe, held.parts
        with telling(recipe.data.group):
            infos = _parameters(recipe.model, old.runtime, inner)
            planned = recipe.plan(infos, inner)
            kept = self._kept(planned, old, held.layout, inner)
            trained = [group for unit in old.runtime.units for group in unit.trainable]
            moving = [group for group in trained if group not in kept.groups]
            moves = Moves.of(held.layout, old.states, old.groups, infos, moving, whole=old.runtime.stage == 0)
        facts = {f"parameter {info.name}": "trained" if info.trainable else "frozen" for info in infos}
        facts |= dict(optimizer_facts(inner, held.layout.names)) | plan_facts(planned.plans)
        agree(_CALL, {**facts, "values written into parameters since the last step": edits}, recipe.data.group)
        return Prepared(self._builder, old, planned, kept, moves, inner)

    def _kept(self, planned: Planned, old: StepParts, layout: ModelLayout, inner: Any) -> Kept:
        stage = stage3_of_parts(old)
        plans = planned.plans
        if stage is not None:
            plans = tuple(plan.on(self._builder.gathers_of) for plan in plans)
        before = {record.unit: record.placement for record in old.placements}
        places = {group: planned.placed(plan.index) for plan in plans for group in plan.groups}
        groups = {
            group.plan: group
            for unit in old.runtime.units
            for group in unit.groups
            if places.get(group.plan) == before[unit.index]
        }
        units = () if stage is None else stage.partitioned
        same = {unit.plan.groups: unit for unit in units if all(group in groups for group in unit.plan.groups)}
        found = KeptGroups.of(plans, groups, same)
        masters: dict[FlatGroup, Masters] = {
            group: [(p, layout.masters_of(n)) for n, p in zip(group.layout.names, group.parameters)]
            for group in groups.values()
            if group.trainable and group in found
        }
        return Kept(
            groups=found,
            masters=masters,
            held=frozenset(id(tensor) for tensor in inner.state if isinstance(tensor, torch.Tensor)),
            earlier=old.states,
            hooks=None if stage is None else stage.hooks,
        )


def _check(run: Runtime, inner: Any) -> None:
    """Refuse it at a wrong moment, or for an optimizer that cannot have it. Does not communicate.

    Raises:
        ZeroOptimizerError, ZeroStateError: say why; nothing has been changed.
    """
    name = type(inner).__name__
    if not isinstance(inner, torch.optim.Optimizer):
        raise ZeroOptimizerError(
            "the model was sharded without an optimizer, so nothing of it can train; give one to dsx_zero.shard"
        )
    if averages_itself(inner):
        raise ZeroOptimizerError(
            f"{name} communicates by itself and keeps errors for the layout that it began with; expected all"
            " parameters in its groups, and unfrozen, when the model is sharded (with lr 0 if they shall start"
            " later)"
        )
    if run.gradients.has_new():
        raise ZeroStateError(
            "got gradients that no step has used, and they cannot move to another layout; expected none: add groups"
            " and unfreeze parameters between optimizer.step() and the next backward, or call"
            " optimizer.zero_grad() first"
        )
    run.publisher.free_gathered()  # raises inside of a forward or backward


def stage3_of_parts(parts: StepParts) -> Any:
    """The object that shards the model at stage 3; None at other stages."""
    if parts.runtime.stage != 3:
        return None
    from .gather.stage3 import Stage3  # lazy import: stages 0-2 need none of it

    return parts.runtime.publisher if isinstance(parts.runtime.publisher, Stage3) else None


def _parameters(model: torch.nn.Module, run: Runtime, inner: Any) -> tuple[ParameterInfo, ...]:
    """All parameters, with what trains from now on: what did before, and what the optimizer holds and is not frozen."""
    held = frozenset(id(p) for group in inner.param_groups for p in group["params"])
    before = {info.name for info in run.infos if info.trainable}
    infos = []
    for info in find_parameters(model, held):
        if info.name not in before and info.trainable and not info.dtype.is_floating_point:
            raise ZeroModelError(f"{info.name}: only real floating-point parameters can be trained, got {info.dtype}")
        infos.append(replace(info, trainable=True) if info.name in before else info)
    return tuple(infos)


@dataclass(frozen=True)
class Prepared:
    """A new layout that all ranks have agreed on."""

    builder: Builder
    old: StepParts
    planned: Planned
    kept: Kept
    moves: Moves
    inner: Any

    def carry_out(self) -> StepParts:
        """Change the layout (collective); the new parts."""
        old, wanted = self.old, {info.name: info.requires_grad for info in self.planned.infos}
        had = old.runtime.gradients.reductions.has_any()
        self._end_old()
        with torch.no_grad():
            for parameter, _ in _trained(old.runtime):
                parameter.requires_grad_(True)  # hooks for gradients can be put on no others
            runtime = self.builder.build(self.planned, self.inner, self.kept)
            new = assemble(self.builder, self.planned, runtime, self.inner, self.kept)
            self.moves.carry_out(runtime, new.masters, new.states, new.groups)
            _carry_errors(old.runtime, runtime)
            for parameter, name in _trained(runtime):
                parameter.requires_grad_(wanted[name])
        for unit in old.runtime.units:
            for group in unit.groups:
                if group not in self.kept.groups:
                    _let_go(group)
        if had:
            runtime.gradients.lost = _GONE
        return new

    def _end_old(self) -> None:
        """Remove the hooks of the old layout; a backward through an earlier graph raises."""
        gradients, stage = self.old.runtime.gradients, stage3_of_parts(self.old)
        gradients.refusal = _STALE
        if self.old.unused is not None:
            self.old.unused.remove_hooks()
        homes = gradients.reductions.homes()
        gradients.remove_hooks()
        for home in homes:
            discard(home)
        if stage is not None:
            stage.executor.free_all()


def _trained(run: Runtime) -> Sequence[tuple[torch.nn.Parameter, str]]:
    return [
        (parameter, name)
        for unit in run.trainable_units()
        for group in unit.trainable
        for parameter, name in zip(group.parameters, group.layout.names)
    ]


def _carry_errors(old: Runtime, new: Runtime) -> None:
    """Make up in the new layout for what quantised gradients have left out (collective)."""
    if old.errors and new.errors:
        units = [(before.trainable, after.trainable) for before, after in zip(old.units, new.units, strict=True)]
        carry_errors(units, old.errors, new.errors)


def _let_go(group: FlatGroup) -> None:
    """The values of a group have another place now."""
    if group.own_master is not None:
        discard(group.own_master)
    if is_partitioned(group):
        discard(group.shard)
