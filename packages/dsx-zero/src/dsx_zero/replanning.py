"""Re-planning in place: a sharded model gets a new layout because more parameters train than when it was sharded.

Parameters stay in their units. Inside a unit, trainable and frozen parameters are in different flat groups, so a
parameter that is trained from now on moves from one group to another. Groups that do not change stay the same objects
(`Kept`). Masters and optimizer states of the other groups move by name, one parameter at a time: every rank gets
the whole parameter and keeps what it owns now. Nothing is rounded.

First everything that can fail is done, and the ranks agree that they want the same (`Replanner.prepare`); then the
layout changes on all of them (`Prepared.carry_out`). Gradients do not move: there must be none that no step has
used. Left out are parameters that are new in the model, and optimizers that communicate by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dsx_comm
import torch

from .alike import agree, optimizer_facts, telling
from .building import Builder, Kept, Planned, StepParts, assemble, plan_facts
from .errors import ZeroModelError, ZeroOptimizerError, ZeroStateError
from .grads.averaging import averages_itself
from .homes.home import discard, read
from .params.flat import FlatGroup
from .params.kept import KeptGroups
from .params.partitioned_unit import is_partitioned
from .params.whole import join_ranges, join_whole, read_whole
from .plan.layout import LocalSlice
from .plan.rank_sets import RankSet
from .plan.units import ParameterInfo, find_parameters
from .runtime import Runtime
from .state.loading import SliceLoad, read_master
from .state.shapes import ShapedState
from .state.slices import State, own_states
from .state.templates import StateTemplates
from .step.masters import Master, Masters
from .transports.errors import carry_errors

__all__ = ["Prepared", "Replanner"]

_CALL = "dsx_zero, changing the layout of the model (add_param_group, replan, or a parameter was unfrozen)"

_STALE = (
    "the model was given a new layout (add_param_group, replan, or a parameter was unfrozen) after the forward of this"
    " backward; expected a forward after the change: run the forward again"
)
_GONE = (
    "the gradients of the last step were dropped when the model was given a new layout, and this backward would have"
    " been added to them; call optimizer.zero_grad() after the step, as before any backward of a new update"
)


class Replanner:
    """Changes the layout of one model, by the recipe that it was sharded with."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def check(self, run: Runtime, inner: Any) -> None:
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

    def prepare(
        self,
        old: StepParts,
        by_name: Mapping[str, tuple[Master, ...]],
        inner: Any,
        names: Mapping[int, str],
        *,
        edits: str,
    ) -> Prepared:
        """Plan for what trains now, and agree on it with the other ranks (collective). Nothing is changed.

        Args:
            by_name: this rank's masters of each parameter.
            names: of parameters, by `id`.
            edits: what users wrote into parameters since the last step; has to be equal on all ranks.

        Raises:
            RanksDifferError: the ranks want different things, or one of them has failed.
            ZeroModelError, ZeroOptimizerError, ZeroStateError: it cannot be.
        """
        recipe = self._builder.recipe
        with telling(recipe.data.group):
            infos = _parameters(recipe.model, old.runtime, inner)
            planned = recipe.plan(infos, inner)
            kept = self._kept(planned, old, by_name, inner)
            moves = _Moves.of(old, by_name, kept, planned)
        facts = {f"parameter {info.name}": "trained" if info.trainable else "frozen" for info in infos}
        facts |= dict(optimizer_facts(inner, names)) | plan_facts(planned.plans)
        agree(_CALL, {**facts, "values written into parameters since the last step": edits}, recipe.data.group)
        return Prepared(self._builder, old, planned, kept, moves, inner)

    def _kept(self, planned: Planned, old: StepParts, by_name: Mapping[str, tuple[Master, ...]], inner: Any) -> Kept:
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
            group: [(p, by_name.get(n, ())) for n, p in zip(group.layout.names, group.parameters)]
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


def stage3_of_parts(parts: StepParts) -> Any:
    """What shards the model at stage 3; None at other stages."""
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
class _Move:
    """A parameter whose masters get another place."""

    name: str
    group: FlatGroup
    masters: tuple[Master, ...]
    part: LocalSlice | None

    @property
    def dtype(self) -> torch.dtype:
        return self.group.master_dtype


class _Whole:
    """The `Reader` of one parameter whose values are whole in memory."""

    def __init__(self, master: torch.Tensor | None, states: Mapping[str, State]) -> None:
        self._master, self._states = master, states

    def param(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        return None  # the parameters have moved already

    def master(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        return None if self._master is None else self._master.reshape(-1)[start:stop]

    def state_keys(self, name: str) -> tuple[str, ...]:
        return tuple(self._states)

    def state(self, key: str, name: str, start: int, stop: int) -> State | None:
        value = self._states[key]
        return value.reshape(-1)[start:stop] if isinstance(value, torch.Tensor) and value.dim() else value

    def shaped_state(self, key: str, name: str, start: int, stop: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        value = self._states[key]
        if isinstance(value, ShapedState):
            return value.values[start - value.start : stop - value.start]
        return value.reshape(-1)[start:stop] if isinstance(value, torch.Tensor) else None


_Described = dict[str, tuple[str | None, Any]]
"""States of one parameter by key: the dtype of one with a value per element, with its shape if that is its own; or the
single value.
"""


@dataclass(frozen=True)
class _Moves:
    """What moves from one layout to the other, in definition order."""

    moves: tuple[_Move, ...]
    states: Any
    whole: bool

    @classmethod
    def of(cls, old: StepParts, by_name: Mapping[str, tuple[Master, ...]], kept: Kept, planned: Planned) -> _Moves:
        """Raises ZeroStateError for states that cannot be divided again."""
        run, places, moves = old.runtime, {}, []
        for unit in run.units:
            for group in unit.trainable:
                if group not in kept.groups:
                    places.update(dict.fromkeys(group.layout.names, group))
        for info in planned.infos:
            group = places.get(info.name)
            if group is not None:
                index = group.layout.index(info.name)
                part = group.whole_slice(index) if run.stage == 0 else group.layout.local_slice(info.name, group.rank)
                moves.append(_Move(info.name, group, by_name.get(info.name, ()), part))
        found = cls(tuple(moves), old.states, run.stage == 0)
        with old.groups.masters():
            templates = StateTemplates(old.states.inner)
            for move in found.moves:
                found._states_of(move, templates, lazily=True)
        return found

    def carry_out(self, new: StepParts) -> None:
        """Bring masters and states to the places in `new` (collective)."""
        by_name: dict[str, list[Master]] = {}
        for master in new.masters:
            by_name.setdefault(master.name, []).append(master)
        with new.groups.masters():
            templates = StateTemplates(new.states.inner)
            described = self._describe(templates)
            for move in self.moves:
                values = self._gather(move, described[move.name], templates)
                load = SliceLoad(new.runtime, new.states.inner)
                for master in by_name.get(move.name, ()):
                    read_master(load, new.states, values, master, templates)
                load.write()
                for master in move.masters:
                    self.states.forget(master)

    def _states_of(self, move: _Move, templates: StateTemplates, *, lazily: bool) -> dict[str, Any]:
        if move.part is None or not move.part.numel:
            return {}
        return own_states(self.states, move.masters, move.part, templates, lazily, lambda tensor: tensor)

    def _describe(self, templates: StateTemplates) -> dict[str, _Described]:
        """Which states each parameter has, on all ranks alike: some may own nothing of it."""
        mine: dict[Any, dict[str, _Described]] = {}
        for move in self.moves:
            found: _Described = {}
            for key, value in self._states_of(move, templates, lazily=True).items():
                if isinstance(value, ShapedState):
                    found[key] = (str(value.values.dtype).removeprefix("torch."), value.shape)
                elif isinstance(value, (int, float)) or not value.dim():
                    found[key] = (None, value.item() if isinstance(value, torch.Tensor) else value)
                else:
                    found[key] = (str(value.dtype).removeprefix("torch."), None)
            mine.setdefault(move.group.ranks, {})[move.name] = found
        described: dict[str, _Described] = {}
        for ranks, names in mine.items():
            if ranks.size > 1 and not self.whole:
                names = dsx_comm.merge_objects(names, _first_known, ranks.group)
            described |= names
        return described

    def _gather(self, move: _Move, described: _Described, templates: StateTemplates) -> _Whole:
        group, device = move.group, move.group.key.device
        master = None
        if group.own_master is not None:
            if self.whole and move.part is not None:
                part = move.part
                master = read(group.own_master, part.offset, part.offset + part.numel)
            elif not self.whole:
                master = read_whole(group.layout, move.name, group.own_master, group.ranks, device=device)
        mine, states = self._states_of(move, templates, lazily=False), {}
        for key, (dtype, value) in described.items():
            held = mine.get(key)
            if dtype is None or self.whole:
                states[key] = value if dtype is None else held
                continue
            kind = getattr(torch, dtype)
            if value is not None:
                states[key] = _join_shaped(held, value, group.ranks, torch.empty(0, dtype=kind, device=device))
                continue
            states[key] = join_whole(
                group.layout, move.name, mine.get(key), group.ranks, dtype=kind, device=device
            ).reshape(-1)
        return _Whole(master, states)


def _join_shaped(held: ShapedState | None, shape: tuple[int, ...], ranks: RankSet, like: torch.Tensor) -> torch.Tensor:
    """All that the ranks have of a state with a shape of its own, 1-D (collective)."""
    start, values = (0, like) if held is None else (held.start, held.values)
    groups = (ranks.group,) if ranks.size > 1 else ()
    return join_ranges(shape, start, values, groups=groups, device=like.device).view(-1)


def _first_known(one: dict[str, _Described], other: dict[str, _Described]) -> dict[str, _Described]:
    # Key by key: of a small state of its own shape, a rank with elements of the parameter may have nothing.
    return {name: {**other[name], **found} for name, found in one.items()}


@dataclass(frozen=True)
class Prepared:
    """A new layout that all ranks have agreed on."""

    builder: Builder
    old: StepParts
    planned: Planned
    kept: Kept
    moves: _Moves
    inner: Any

    def carry_out(self) -> StepParts:
        """Change the layout (collective); the new parts."""
        old, wanted = self.old, {info.name: info.requires_grad for info in self.planned.infos}
        had = old.runtime.gradients.has_any()
        self._end_old()
        with torch.no_grad():
            for parameter, _ in _trained(old.runtime):
                parameter.requires_grad_(True)  # hooks for gradients can be put on no others
            runtime = self.builder.build(self.planned, self.inner, self.kept)
            new = assemble(self.builder, self.planned, runtime, self.inner, self.kept)
            self.moves.carry_out(new)
            _carry_errors(old.runtime, runtime)
            for parameter, name in _trained(runtime):
                parameter.requires_grad_(wanted[name])
        for unit in old.runtime.units:
            for group in unit.groups:
                if group not in self.kept.groups:
                    _let_go(group)
        if had:
            runtime.gradients.refuse_until_clear(_GONE)
        return new

    def _end_old(self) -> None:
        """Remove the hooks of the old layout; a backward through an earlier graph raises."""
        gradients, stage = self.old.runtime.gradients, stage3_of_parts(self.old)
        gradients.refuse_backwards(_STALE)
        if self.old.unused is not None:
            self.old.unused.remove_hooks()
        homes = gradients.homes()
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
    """What quantised gradients have left out is made up for in the new layout (collective)."""
    if old.errors and new.errors:
        units = [(before.trainable, after.trainable) for before, after in zip(old.units, new.units, strict=True)]
        carry_errors(units, old.errors, new.errors)


def _let_go(group: FlatGroup) -> None:
    """The values of a group have another place now."""
    if group.own_master is not None:
        discard(group.own_master)
    if is_partitioned(group):
        discard(group.shard)
