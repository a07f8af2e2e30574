"""Executes the plan of a step: fetch, unscale, clip and step, write, publish, store.

Unscaling and clipping are one factor that is known before the first sub-group is stepped, so that an overflow changes
nothing. Where the optimizer's kernel takes the factor, gradients stay as they are. An optimizer that offers `step_flat`
is called with one master after the other; any other sees the gradients of the sub-group's masters, and only these
masters in its groups.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..homes.home import write
from ..lanes import HostLane, Lane, Ticket
from ..params.flat import Part
from ..runtime import Runtime
from .frozen import Frozen
from .masters import Master, copy_targets
from .param_groups import StepGroups
from .parts import has_step_hooks, why_at_once
from .plan import Kind, StepPlan, make_plan
from .states import OptimizerStates, Visit

__all__ = ["StepRunner", "plan_step"]


class StepRunner:
    """Steps one optimizer.

    Args:
        inner: the user's optimizer.
        masters: what it steps, in layout order.
        groups: its parameter groups.
        plan: the step.
        lane: on which states and masters come and go.
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
        """What every step does; one with hooks on the optimizer steps all masters in one call."""
        self._inner, self._runtime, self._masters = inner, runtime, tuple(masters)
        self._groups, self._frozen, self._states = groups, frozen, states
        self._lane = lane or HostLane()
        self._units = {unit.index: unit for unit in runtime.trainable_units()}
        parameters = inspect.signature(inner.step).parameters
        self._takes_scale = "grad_scale" in parameters
        self._takes_copies = "copy_out" in parameters
        self._copies = copy_targets(masters) if self._takes_copies else {}
        self._device = masters[0].tensor.device if masters else torch.device("cpu")
        self._devices = {master.tensor.device for master in masters} or {self._device}
        self._unit_of = {id(group): unit.index for unit in self._units.values() for group in unit.trainable}
        self._number_of = groups.numbers()
        self._whole_plan = plan
        if len(plan.sub_groups) > 1:
            sizes = [(self._unit_of[id(master.group)], master.numel) for master in masters]
            self._whole_plan = make_plan(sizes, list(self._units), moves=plan.moves)
        self._members = {id(p): [groups.subset([m.tensor for m in self._masters[g.start : g.stop]])
                                 for g in p.sub_groups] for p in (self._whole_plan, plan)}  # fmt: skip
        self._visits: dict[int, list[Visit]] = {}
        self._stored: list[list[Visit]] = []
        self._written: list[Ticket] = []

    def run(self, factor: float | torch.Tensor) -> None:
        """One step with the reduced gradients times `factor`."""
        if isinstance(factor, torch.Tensor) and self._devices != {factor.device}:
            factor = factor.item()  # masters on the host are stepped by the host, which has to know the number
        plan = self._whole_plan if has_step_hooks(self._inner) else self.plan
        by_flat = len(plan.sub_groups) > 1 and hasattr(self._inner, "step_flat")
        try:
            for action in plan.actions:
                if action.kind is Kind.PUBLISH:
                    self._publish(action.target)
                    continue
                group = plan.sub_groups[action.target]
                masters = self._masters[group.start : group.stop]
                if action.kind is Kind.FETCH:
                    self._fetch(action.target, masters)
                elif action.kind is Kind.STEP:
                    members = self._members[id(plan)][action.target]
                    self._step(masters, factor, members, self._visits.get(action.target, []), by_flat=by_flat)
                elif action.kind is Kind.WRITE:
                    self._write(masters)
                else:
                    self._store(action.target)
        finally:
            self._end()

    # The actions ------------------------------------------------------------------------------------------------------

    def _fetch(self, number: int, masters: Sequence[Master]) -> None:
        if len(self._stored) > 1:  # the plan allows two sub-groups in memory: the earlier one's buffers must be free
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
        grads = self._frozen.stepped(masters, self._gradients(masters))
        if by_flat:
            self._step_flat(masters, grads, factor)
            return
        for master, grad in zip(masters, grads):
            master.tensor.grad = grad
        try:
            with self._groups.masters(members):
                self._call_inner(factor, [grad for grad in grads if grad is not None], masters)
        finally:
            for master in masters:
                master.tensor.grad = None

    def _gradients(self, masters: Sequence[Master]) -> list[torch.Tensor]:
        grads: list[torch.Tensor] = []
        for start, stop in _runs(masters):
            parts = [Part(master.name, master.slice) for master in masters[start:stop]]
            grads.extend(self._runtime.gradients.parts(masters[start].group, parts))
        return [grad.view(master.shape) for master, grad in zip(masters, grads, strict=True)]

    def _step_flat(
        self, masters: Sequence[Master], grads: Sequence[torch.Tensor | None], factor: float | torch.Tensor
    ) -> None:
        scale: float | torch.Tensor = 1.0
        if isinstance(factor, torch.Tensor) or has_reciprocal(factor):
            scale = 1.0 / factor
        else:
            torch._foreach_mul_([grad for grad in grads if grad is not None], factor)  # pyright: ignore[reportPrivateImportUsage]
        for master, grad in zip(masters, grads):
            if grad is None:
                continue
            number, tensor = self._number_of[id(master.tensor)], master.tensor
            state = self._inner.state[tensor]
            if not state:
                state.update(self._inner.new_flat_state(tensor, group=number))
            copy = self._copies.get(tensor)
            self._inner.step_flat(tensor, grad, state, group=number, grad_scale=scale, copy_out=copy)

    def _call_inner(self, factor: float | torch.Tensor, grads: list[torch.Tensor], masters: Sequence[Master]) -> None:
        inner, keywords = self._inner, {}
        if self._copies:
            keywords["copy_out"] = {m.tensor: self._copies[m.tensor] for m in masters if m.tensor in self._copies}
        if isinstance(factor, float) and factor == 1.0:
            inner.step(**keywords)
        elif self._takes_scale and (isinstance(factor, torch.Tensor) or has_reciprocal(factor)):
            inner.step(**{**keywords, "grad_scale": 1.0 / factor})
        elif self._torch_scales():
            scale = factor if isinstance(factor, torch.Tensor) else torch.tensor(factor, device=self._device)
            inner.grad_scale = scale.reciprocal()
            try:
                inner.step()
            finally:
                del inner.grad_scale
        else:
            if grads:  # a rank may own nothing
                torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]
            inner.step(**keywords)

    def _torch_scales(self) -> bool:
        """Do the kernels of torch's own fused optimizers take the factor (as they do for `torch.amp.GradScaler`)?"""
        return (
            type(self._inner).__module__.startswith("torch.optim")
            and getattr(self._inner, "_step_supports_amp_scaling", False)
            and all(group.get("fused") for group in self._inner.param_groups)
        )

    def _write(self, masters: Sequence[Master]) -> None:
        """The parameters get the masters' values, in their dtype; nothing to do where a master is the parameter's
        own memory.
        """
        for start, stop in _runs(masters):
            group, first, last = masters[start].group, masters[start].slice, masters[stop - 1].slice
            home = group.own_master
            if home is None or all(master.tensor in self._copies for master in masters[start:stop]):
                continue
            target = group.stepped.view()
            source = home.view()
            if target is not None and source is not None and target.device == source.device:
                write(group.stepped, source[first.offset : last.offset + last.numel], first.offset)
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

    def _wait_stored(self) -> None:
        for visit in self._stored.pop(0):
            visit.wait()

    def _end(self) -> None:
        """Nothing of the step is under way any more; after an error, what was fetched goes back as it is."""
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
    inner: Any, runtime: Runtime, masters: Sequence[Master], *, most: int | None, moves: bool = False
) -> StepPlan:
    """The plan for an optimizer: in one call, or in sub-groups of at most `most` elements, if it may be stepped in
    parts. Where units are published by gathering them, sub-groups end behind units, so that a unit travels while the
    next one is stepped.
    """
    unit_of = {id(group): unit.index for unit in runtime.trainable_units() for group in unit.trainable}
    sizes = [(unit_of[id(master.group)], master.numel) for master in masters]
    units = [unit.index for unit in runtime.trainable_units()]
    if runtime.whole or why_at_once(inner) is not None:
        return make_plan(sizes, units, moves=moves)
    gathers = runtime.stage in (1, 2) and runtime.ranks.size > 1
    return make_plan(sizes, units, most=most, overlap=gathers, moves=moves)


def _runs(masters: Sequence[Master]) -> list[tuple[int, int]]:
    """Ranges of masters that lie in one flat group; they are neighbours there."""
    runs, start = [], 0
    for place in range(1, len(masters) + 1):
        if place == len(masters) or masters[place].group is not masters[start].group:
            runs.append((start, place))
            start = place
    return runs if masters else []


def has_reciprocal(factor: float) -> bool:
    """Can gradients be divided by `1 / factor`? Clipping to an infinite norm gives 0, to a NaN gives NaN."""
    return factor != 0.0 and math.isfinite(factor) and math.isfinite(1.0 / factor)
