"""Executes the plan of a step: fetch, unscale, clip and step, write, publish, store.

Unscaling and clipping are one factor, which is known before the first sub-group is stepped. So a step that overflows
changes nothing. `InnerStep` calls the optimizer.

Another thread may step sub-groups beforehand (`step_apart`); `run` then only writes and publishes these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ..homes.home import write
from ..lanes import HostLane, Lane, Ticket, transfer
from ..params.flat import FlatGroup, Part
from ..runtime import Runtime
from .frozen import Frozen
from .inner import InnerStep
from .masters import Master, copy_targets
from .param_groups import StepGroups
from .parts import has_step_hooks, why_at_once
from .plan import Kind, Pipeline, StepPlan, make_plan
from .states import OptimizerStates, Visit

__all__ = ["ReadGradients", "StepRunner", "plan_step"]

ReadGradients = Callable[[FlatGroup, Sequence[Part]], tuple[torch.Tensor, ...]]
"""Gives the gradients of parts of a group, as `Gradients.parts` does."""


class StepRunner:
    """Steps one optimizer.

    Args:
        inner: the user's optimizer.
        masters: the tensors that it steps, in layout order.
        groups: exchanges the tensors in its parameter groups.
        plan: the plan of a step.
        lane: fetches and stores masters and states.
    """

    def __init__(
        self,
        inner: Any,
        runtime: Runtime,
        masters: Sequence[Master],
        *,
        groups: StepGroups,
        frozen: Frozen,
        states: OptimizerStates,
        plan: StepPlan,
        lane: Lane | None = None,
    ) -> None:
        self.plan = plan
        """The plan of every step. While the optimizer has hooks, all masters are stepped in one call instead."""
        self._inner, self._runtime, self._masters = inner, runtime, tuple(masters)
        self._groups, self._frozen, self._states = groups, frozen, states
        self._lane = lane or HostLane()
        self._units = {unit.index: unit for unit in runtime.trainable_units()}
        device = masters[0].tensor.device if masters else torch.device("cpu")
        self._devices = {master.tensor.device for master in masters} or {device}
        self._unit_of = {id(group): unit.index for unit in self._units.values() for group in unit.trainable}
        self.inner_step = InnerStep(inner, groups, groups.numbers(), copy_targets(masters), device)
        """Calls the optimizer. `InnerStep.for_twin` makes one for another thread from it."""
        self._has_flat_step = hasattr(inner, "step_flat")
        self._whole_plan = plan
        if len(plan.sub_groups) > 1:
            sizes = [(self._unit_of[id(master.group)], master.numel) for master in masters]
            self._whole_plan = make_plan(sizes, list(self._units), moves=plan.moves)
        self._members = {id(p): [groups.subset([m.tensor for m in self._masters[g.start : g.stop]])
                                 for g in p.sub_groups] for p in (self._whole_plan, plan)}  # fmt: skip
        self.on_host_step: Callable[[int], AbstractContextManager[object]] = lambda sub_group: nullcontext()
        """Makes a context; `step_apart` steps a sub-group inside it, on another thread."""
        self._visits: dict[int, list[Visit]] = {}
        self._stored: list[list[Visit]] = []
        self._written: list[Ticket] = []

    def run(self, factor: float | torch.Tensor, stepped: Collection[int] = ()) -> None:
        """Do one step with the reduced gradients times `factor`.

        Args:
            stepped: sub-groups that `step_apart` has stepped already.
        """
        if isinstance(factor, torch.Tensor) and self._devices != {factor.device}:
            factor = factor.item()  # the host steps masters that are in host memory, so it needs the number itself
        plan = self._whole_plan if has_step_hooks(self._inner) and not stepped else self.plan
        by_flat = len(plan.sub_groups) > 1 and self._has_flat_step
        try:
            for action in plan.actions:
                if action.kind is Kind.PUBLISH:
                    self._publish(action.target)
                    continue
                group = plan.sub_groups[action.target]
                masters, apart = self._masters[group.start : group.stop], action.target in stepped
                if action.kind is Kind.WRITE:
                    self._write(masters, copied=not apart)
                elif apart:
                    continue
                elif action.kind is Kind.FETCH:
                    self._fetch(action.target, masters)
                elif action.kind is Kind.STEP:
                    members = self._members[id(plan)][action.target]
                    self._step(masters, factor, members, self._visits.get(action.target, []), by_flat=by_flat)
                else:
                    self._store(action.target)
        finally:
            self._end()

    def sub_groups_of(self, unit: int) -> list[int]:
        """The sub-groups with masters of a unit, in order."""
        return [
            number
            for number, group in enumerate(self.plan.sub_groups)
            if any(self._unit_of[id(m.group)] == unit for m in self._masters[group.start : group.stop])
        ]

    def masters_in(self, number: int) -> tuple[Master, ...]:
        """The masters of a sub-group."""
        group = self.plan.sub_groups[number]
        return self._masters[group.start : group.stop]

    def step_apart(self, number: int, factor: float, inner_step: InnerStep, gradients: ReadGradients) -> None:
        """Step a sub-group whose masters and states are in memory, and do not write to the parameters. Another thread
        may call this: it uses nothing that `run` changes.

        Args:
            inner_step: made by `InnerStep.for_twin`.
            gradients: reads the gradients.
        """
        masters = self.masters_in(number)
        grads = self._frozen.stepped(masters, _gradients(masters, gradients))
        members = self._members[id(self.plan)][number]
        with self.on_host_step(number):
            inner_step.step(masters, grads, factor, members, by_flat=self._has_flat_step)

    # The actions ------------------------------------------------------------------------------------------------------

    def _fetch(self, number: int, masters: Sequence[Master]) -> None:
        while len(self._stored) > self.plan.pipeline.behind:  # the buffers of earlier sub-groups must be free
            self._wait_stored()
        self._visits[number] = [self._states.fetch(master, self._lane) for master in masters]

    def _step(
        self,
        masters: Sequence[Master],
        factor: float | torch.Tensor,
        members: list[list[torch.Tensor]],
        visits: Sequence[Visit],
        *,
        by_flat: bool,
    ) -> None:
        for visit in visits:
            self._states.attach(visit)
        grads = self._frozen.stepped(masters, _gradients(masters, self._runtime.gradients.parts))
        self.inner_step.step(masters, grads, factor, members, by_flat=by_flat)

    def _write(self, masters: Sequence[Master], *, copied: bool) -> None:
        """Write the masters' values to the parameters, in the parameters' dtype. Does nothing where a master is the
        parameter's own memory, or where the optimizer has written the copy itself (`copied`).
        """
        for start, stop in _runs(masters):
            group, first, last = masters[start].group, masters[start].slice, masters[stop - 1].slice
            home = group.own_master
            copies = self.inner_step.copies if copied else {}
            if home is None or (copies and all(m.tensor in copies for m in masters[start:stop])):
                continue
            target = group.stepped.view()
            source = home.view()
            if target is not None and source is not None and target.device == source.device:
                elements = slice(first.offset, last.offset + last.numel)
                if home.tier == group.stepped.tier:
                    target[elements].copy_(source[elements])
                    continue
                job = partial(write, group.stepped, source[elements], first.offset)
                self._written.append(transfer(self._lane, job, f"to {group.stepped.tier}", source[elements].nbytes))
                continue
            for master in masters[start:stop]:
                values = master.tensor.detach().view(-1).to(group.key.dtype)
                self._written.append(group.stepped.store(values, self._lane, start=master.slice.offset))

    def _publish(self, unit: int) -> None:
        written, self._written = self._written, []
        for ticket in written:
            ticket.wait()
        self._runtime.publisher.publish(self._units[unit])

    def _store(self, number: int) -> None:
        visits = self._visits.pop(number)
        for visit in visits:
            self._states.store(visit, self._lane)
        self._stored.append(visits)
        if not self.plan.pipeline.behind:
            self._wait_stored()

    def _wait_stored(self) -> None:
        for visit in self._stored.pop(0):
            visit.wait()

    def _end(self) -> None:
        """End everything that is under way. After an error, fetched sub-groups are stored as they are."""
        for number in list(self._visits):
            for visit in self._visits[number]:
                self._states.attach(visit)
            self._store(number)
        while self._stored:
            self._wait_stored()
        written, self._written = self._written, []
        for ticket in written:
            ticket.wait()


def plan_step(
    inner: Any,
    runtime: Runtime,
    masters: Sequence[Master],
    *,
    most: int | None,
    moves: bool = False,
    by_unit: bool = False,
    pipeline: Pipeline | None = None,
) -> StepPlan:
    """The plan for an optimizer: one sub-group, or several of at most `most` elements if the optimizer may be stepped
    in parts. Where publishing a unit means gathering it, sub-groups end after units, so that one unit is gathered while
    the next one is stepped.
    """
    unit_of = {id(group): unit.index for unit in runtime.trainable_units() for group in unit.trainable}
    sizes = [(unit_of[id(master.group)], master.numel) for master in masters]
    units = [unit.index for unit in runtime.trainable_units()]
    if runtime.whole or why_at_once(inner) is not None:
        return make_plan(sizes, units, moves=moves)
    gathers = runtime.stage in (1, 2) and runtime.ranks.size > 1
    return make_plan(
        sizes, units, most=most, overlap=gathers, moves=moves, by_unit=by_unit, pipeline=pipeline or Pipeline()
    )


def _gradients(masters: Sequence[Master], read: ReadGradients) -> list[torch.Tensor]:
    """The gradients of these masters, in their shapes."""
    grads: list[torch.Tensor] = []
    for start, stop in _runs(masters):
        parts = []
        for master in masters[start:stop]:  # a loop instead of one function call per group
            parts.append(Part(master.name, master.slice))
        grads.extend(read(masters[start].group, parts))
    return [g if g.is_sparse else g.view(master.shape) for master, g in zip(masters, grads, strict=True)]


def _runs(masters: Sequence[Master]) -> list[tuple[int, int]]:
    """Ranges of neighbouring masters that lie in one flat group."""
    runs, start = [], 0
    for place in range(1, len(masters) + 1):
        if place == len(masters) or masters[place].group is not masters[start].group:
            runs.append((start, place))
            start = place
    return runs if masters else []
