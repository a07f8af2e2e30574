"""Executes the plan of a step: fetch, unscale, clip and step, write, publish, store.

Unscaling and clipping are one factor, which is known before the first sub-group is stepped. So a step that overflows
changes nothing. `InnerStep` calls the optimizer.

Another thread may step sub-groups beforehand (`apart`); `run` then only writes and publishes these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

import torch
from dsx_comm.lanes import CudaLane, HostLane, Lane, Ticket, transfer

from ..homes.home import write
from ..params.flat import FlatGroup
from ..runtime import Runtime
from .host_thread import ApartSteps
from .inner import InnerStep, StepGroups, gradients_of, has_step_hooks, runs_of, takes_narrow, why_at_once
from .masters import Master, copy_targets
from .matrices import MatrixStep
from .model_check import Frozen
from .plan import Action, Kind, Pipeline, StepPlan, make_plan
from .states import OptimizerStates
from .transfers import SubGroupTransfers

__all__ = ["StepFailure", "StepRunner", "plan_step"]

T = TypeVar("T")


class StepFailure:
    """The first failure on this rank in the running step.

    With `deferred`, the parts of a step that follow a failure are left out, but not their collectives, and the failure
    is raised at the end of the step. That is for an owner whose ranks agree then whether all could step. Without, a
    failure is raised at once.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.first: Exception | None = None

    def begin(self) -> None:
        """Begin a step."""
        self.first = None

    def run(self, action: Callable[[], T], instead: T) -> T:
        """Do a part of the step that does not communicate. Gives `instead` where this part or one before it failed."""
        if self.first is not None:
            return instead
        try:
            return action()
        except Exception as error:
            if not self.deferred:
                raise
            self.first = error
            return instead

    def end(self) -> None:
        """End the step: raise what has failed."""
        failure, self.first = self.first, None
        if failure is not None:
            raise failure


class StepRunner:
    """Steps one optimizer.

    Args:
        inner: the user's optimizer.
        masters: the tensors that it steps, in layout order.
        groups: exchanges the tensors in its parameter groups.
        plan: the plan of a step.
        apart_plan: the plan of a step of which sub-groups are stepped beforehand; None: `plan` too.
        failure: collects what fails in the step.
        lane: fetches and stores masters and states.
        matrices: steps the optimizer, if its rule takes whole matrices.
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
        failure: StepFailure,
        plan: StepPlan,
        apart_plan: StepPlan | None = None,
        lane: Lane | None = None,
        matrices: MatrixStep | None = None,
    ) -> None:
        self.plan = plan
        """The plan of every step in which nothing is stepped beforehand. While the optimizer has hooks, all masters are
        stepped in one call instead.
        """
        apart_plan = apart_plan or plan
        self._inner, self._runtime, self._masters = inner, runtime, tuple(masters)
        self._matrices = matrices
        self._frozen, self._lane, self._failure = frozen, lane or HostLane(), failure
        self._host_lane = HostLane() if isinstance(self._lane, CudaLane) else self._lane
        """For what never leaves the host. The lane of a stream would wait for each transfer before it goes on."""
        self._units = {unit.index: unit for unit in runtime.trainable_units()}
        device = masters[0].tensor.device if masters else torch.device("cpu")
        self._devices = {master.tensor.device for master in masters} or {device}
        on_host = {found.type for found in self._devices} == {"cpu"}
        states_lane = self._host_lane if on_host else self._lane
        self._transfers = SubGroupTransfers(states, states_lane, behind=plan.pipeline.behind)
        self._unit_of = {id(group): unit.index for unit in self._units.values() for group in unit.trainable}
        self.inner_step = InnerStep(inner, groups, groups.numbers(), copy_targets(masters), device, matrices)
        """Calls the optimizer. `InnerStep.for_twin` makes one for another thread from it."""
        self._has_flat_step, self._takes_narrow = hasattr(inner, "step_flat"), takes_narrow(inner)
        self._whole_plan = plan
        if len(plan.sub_groups) > 1:
            sizes = [(self._unit_of[id(master.group)], master.numel) for master in masters]
            self._whole_plan = make_plan(sizes, list(self._units), moves=plan.moves)
        self._members = {id(p): [groups.subset([m.tensor for m in self._masters[g.start : g.stop]])
                                 for g in p.sub_groups] for p in (self._whole_plan, plan, apart_plan)}  # fmt: skip
        self.apart = ApartSteps(
            masters,
            plan=apart_plan,
            frozen=frozen,
            states=states,
            members=self._members[id(apart_plan)],
            by_flat=self._has_flat_step,
        )
        """Steps sub-groups on another thread, before `run`."""
        self._moves = plan.moves or apart_plan.moves
        self.blocks = states.blocks if self._moves else None
        """Memory for what a step makes of gradients and masters that are not in memory; None: all are."""
        self._written: list[Ticket] = []

    def read_ahead(self) -> None:
        """Start fetching what `run` steps first, before the norm is known. Does nothing where nothing moves, or where
        hooks expect one call.
        """
        self.forget_ahead()
        if not has_step_hooks(self._inner):
            for action in takewhile(lambda action: action.kind is Kind.FETCH, self.plan.actions):
                self._do(action, self.plan, 1.0, False)

    def forget_ahead(self) -> None:
        """Drop what `read_ahead` has fetched: there is no step, or another plan."""
        if self._moves:
            self._transfers.abandon()

    def run(self, factor: float | torch.Tensor, stepped: Collection[int] = ()) -> None:
        """Do one step with the reduced gradients times `factor`.

        Args:
            stepped: sub-groups of `apart.plan` that `apart` has stepped already.
        """
        if isinstance(factor, torch.Tensor) and self._devices != {factor.device}:
            factor = factor.item()  # the host steps masters that are in host memory, so it needs the number itself
        plan = self._whole_plan if has_step_hooks(self._inner) else self.plan
        plan = self.apart.plan if stepped else plan
        if self._moves and (plan is not self.plan or self._transfers.are_stale()):
            self.forget_ahead()
        try:
            for action in plan.actions:
                if action.kind is Kind.PUBLISH:
                    self._publish(action.target)
                elif action.kind is Kind.STEP and self._matrices is not None and self._failure.first is not None:
                    self._matrices.take_part()  # the other ranks wait for its pieces
                else:
                    self._failure.run(partial(self._do, action, plan, factor, action.target in stepped), None)
        finally:
            self._end()

    def _do(self, action: Action, plan: StepPlan, factor: float | torch.Tensor, apart: bool) -> None:
        """One action on a sub-group. `apart`: it has been stepped already."""
        group = plan.sub_groups[action.target]
        masters = self._masters[group.start : group.stop]
        if action.kind is Kind.WRITE:
            copied = not apart and not has_step_hooks(self._inner)  # hooks behind the step may change masters
            self._write(self._write_waiting(action.target, masters) if apart else masters, copied=copied)
        elif apart:
            return
        elif action.kind is Kind.FETCH:
            self._transfers.fetch(action.target, masters)
        elif action.kind is Kind.STEP:
            if self._moves:
                self._transfers.attach(action.target)
            by_flat = len(plan.sub_groups) > 1 and self._has_flat_step
            self._step(masters, factor, self._members[id(plan)][action.target], by_flat=by_flat)
        else:
            self._transfers.store(action.target)

    def sub_groups_of(self, unit: int) -> list[int]:
        """The sub-groups of `apart.plan` with masters of a unit, in order."""
        return [
            number
            for number, group in enumerate(self.apart.plan.sub_groups)
            if any(self._unit_of[id(m.group)] == unit for m in self._masters[group.start : group.stop])
        ]

    # The actions ------------------------------------------------------------------------------------------------------

    def _step(
        self,
        masters: Sequence[Master],
        factor: float | torch.Tensor,
        members: list[list[torch.Tensor]],
        *,
        by_flat: bool,
    ) -> None:
        read = self._runtime.gradients.reductions.parts
        if self.blocks is not None:
            read = partial(read, blocks=self.blocks)
        if by_flat and self._takes_narrow:
            read = partial(read, as_kept=True)
        grads = self._frozen.stepped(masters, gradients_of(masters, read))
        self.inner_step.step(masters, grads, factor, members, by_flat=by_flat)

    def _write(self, masters: Sequence[Master], *, copied: bool) -> None:
        """Write the masters' values to the parameters, in the parameters' dtype. Does nothing where a master is the
        parameter's own memory, or where the optimizer has written the copy itself (`copied`).
        """
        for start, stop in runs_of(masters):
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
                values = master.tensor.detach().view(-1)
                if self.blocks is not None and values.device.type == "cpu":
                    values = self.blocks.converted(values, group.key.dtype)
                values = values.to(group.key.dtype)
                lane = self._lane_to(group, values)
                self._written.append(group.stepped.store(values, lane, start=master.slice.offset))

    def _lane_to(self, group: FlatGroup, values: torch.Tensor) -> Lane:
        """The lane that carries new values to the parameters of a group."""
        stays = values.device.type == group.stepped.device.type == "cpu"
        return self._host_lane if stays else self._lane

    def _write_waiting(self, number: int, masters: Sequence[Master]) -> Sequence[Master]:
        """Write the new values that wait since a sub-group was stepped apart. Returns the masters of the others."""
        waiting = self.apart.take(number)
        for new in waiting:
            group, start = new.master.group, new.master.slice.offset
            if group.own_master is None and group.stepped.view() is not None:
                write(group.stepped, new.values, start)  # from memory to memory of one tier
            else:
                self._written.append(group.stepped.store(new.values, self._lane_to(group, new.values), start=start))
        written = {id(new.master) for new in waiting}
        return [master for master in masters if id(master) not in written]

    def _publish(self, unit: int) -> None:
        written, self._written = self._written, []
        for ticket in written:
            self._failure.run(ticket.wait, None)
        self._runtime.publisher.publish(self._units[unit])

    def _end(self) -> None:
        """End everything that is under way. After an error, fetched sub-groups are stored as they are."""
        if self._moves:
            self._transfers.end()
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
    if runtime.stage == 0 or why_at_once(inner) is not None:
        return make_plan(sizes, units, moves=moves)
    gathers = runtime.stage in (1, 2) and runtime.ranks.size > 1
    return make_plan(
        sizes, units, most=most, overlap=gathers, moves=moves, by_unit=by_unit, pipeline=pipeline or Pipeline()
    )
