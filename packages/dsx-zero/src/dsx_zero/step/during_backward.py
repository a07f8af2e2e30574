"""The step of units on the host while backward goes on (decision 0042).

`announce` says that the coming backward is the last one before the step. When the last reduction of a unit is complete,
a worker thread steps the unit's masters, in host memory or on disk. The parameters keep their old values until
`step()`: backward, other ranks' gathers and the user see the values from before the update (`apart`).

The result has the same bits as a step after backward only if nothing changes in between. Therefore

* a unit is stepped only after all ranks have said, together with the unit's reduction, that it was the last one;
* the settings (learning rates) are those at the announcement; `step` raises if they have changed since;
* `step` raises if gradients, masters or parameters were written between backward and step;
* the first announced steps are trials: nothing is stepped early in them. If one of the changes above is seen in a
  trial, units are stepped after backward from then on.

Clipping and the check for overflow need the norm before the first update. Such steps are not announced.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dsx_comm.lanes import Ticket

from ..errors import ZeroStateError
from ..grads.reductions import cut_parts
from ..homes.home import Home
from ..homes.stored import StoredHome
from ..order.channel import Answer, Asks
from ..params.flat import FlatGroup, Part
from ..runtime import Runtime
from .edits import Edits
from .failures import raise_on_all_ranks
from .inner import InnerStep, Settings, has_step_hooks, same_settings, settings_of
from .runner import StepRunner
from .worker import Worker

__all__ = ["StepDuringBackward"]

_log = logging.getLogger(__name__)

_TRIALS = 2
"""Announced steps in which nothing is stepped early."""

_REMEDY = (
    "do it before the last backward of an update or after step(), or set"
    " zero_optimization.offload_optimizer.step_during_backward to false. This step was begun and cannot be completed:"
    " load a checkpoint to go on"
)


@dataclass
class _Announced:
    """The step that was announced."""

    grad_scale: float
    settings: Settings
    inner_step: InnerStep
    trial: bool


@dataclass
class _Group:
    """A flat group whose masters were stepped, and numbers that show later writes to it: each write makes one of them
    grow.
    """

    group: FlatGroup
    gradients: Home
    arriving: Ticket | None
    before: list[int] = field(default_factory=list)
    """Of gradients and partitioned parameters, from before the thread has begun."""
    stepped: int = 0
    """Of the masters, which the thread writes itself."""

    def __post_init__(self) -> None:
        self.before = self._sources()

    def _sources(self) -> list[int]:
        return [_version(self.gradients), self.group.replaced]

    def note_stepped(self) -> None:
        """The masters have the values that they keep until the step."""
        self.stepped = _version(self.group.master)

    def was_written(self) -> bool:
        """Was anything written since?"""
        return self._sources() != self.before or _version(self.group.master) != self.stepped


def _version(home: Home | None) -> int:
    view = None if home is None else home.view()
    if view is not None:
        return view._version
    return home.writes if isinstance(home, StoredHome) else 0  # units with other tiers are not stepped early


class StepDuringBackward:
    """Steps a unit on the host as soon as its last reduction is complete, while backward goes on.

    Args:
        runner: executes the step; no sub-group of `runner.apart.plan` spans two units.
        units: the units that may be stepped early.
        channel: asks a yes-or-no question of all ranks.
    """

    def __init__(
        self, runtime: Runtime, runner: StepRunner, edits: Edits, *, units: Collection[int], channel: Asks, inner: Any
    ) -> None:
        self._runtime, self._runner, self._edits, self._channel, self._inner = runtime, runner, edits, channel, inner
        self._sub_groups = {unit: runner.sub_groups_of(unit) for unit in units}
        self._names = {unit.index: str(unit.plan) for unit in runtime.units}
        device = next((group.key.device for u in runtime.trainable_units() for group in u.trainable), "cpu")
        self._worker = Worker(torch.device(device))
        self._announced: _Announced | None = None
        self._was_announced = False
        self._asks = runtime.ranks.size == 1
        """Whether each reduction also asks all ranks. It does from the step after the first announced one, on every
        rank. One rank alone has no other rank to wait for.
        """
        self._answers: dict[int, Answer] = {}
        self._stepped: dict[int, tuple[_Group, ...]] = {}
        """By unit: the groups that the worker steps. In a trial nothing is stepped, and these are only watched."""
        self._trials, self._only_afterwards = _TRIALS, False
        self._disturbed: str | None = None

    # Before and during backward ---------------------------------------------------------------------------------------

    def announce(self, grad_scale: float) -> bool:
        """Say that the coming backward is the last one before `step(grad_scale=...)`. Returns whether units will be
        stepped during it.
        """
        self._runtime.gradients.expect_last()
        self._was_announced = True
        if self._announced is not None:
            self._report_disturbance("more than one backward was announced as the last before the step")
        if self._only_afterwards or has_step_hooks(self._inner):
            return False
        settings = settings_of(self._inner)
        inner_step = self._runner.inner_step.for_twin(settings)
        self._announced = _Announced(grad_scale, settings, inner_step, self._trials > 0)
        return not self._announced.trial

    def begin_backward(self) -> None:
        """See `ReductionWatch`: units that are stepped already must not get other gradients."""
        if self._stepped:
            self._report_disturbance("a backward came after the one that was said to be the last before the step")
            self.check_not_begun()

    def started(self, unit: int) -> None:
        """See `ReductionWatch`."""
        if unit in self._stepped and self._announced is not None and self._announced.trial:
            del self._stepped[unit]  # it was not the last one, and the ranks would have said so
        elif unit in self._stepped:
            self._report_disturbance(f"the gradients of unit {self._names[unit]} were reduced again after its step")
        if self._asks:
            self._answers[unit] = self._channel.ask(self._runtime.gradients.is_final(unit))

    def finished(self, unit: int) -> None:
        """See `ReductionWatch`."""
        answer, announced = self._answers.pop(unit, None), self._announced
        final = answer is not None and answer.get()
        if announced is None or unit not in self._sub_groups or not (final or announced.trial):
            return
        groups = tuple(_Group(*found) for found in self._runtime.gradients.reduced(unit))
        self._stepped[unit] = groups
        if announced.trial:
            _wait_for_gradients(groups)
            _note_stepped(groups)
        else:
            self._worker.submit(lambda: self._step(self._sub_groups[unit], groups, announced))

    def _step(self, sub_groups: Sequence[int], groups: Sequence[_Group], announced: _Announced) -> None:
        """Step the masters of a unit. Runs on the worker thread."""
        _wait_for_gradients(groups)
        self._edits.take_over([entry.group for entry in groups])
        of = {id(entry.group): entry.gradients for entry in groups}

        def gradients(group: FlatGroup, parts: Sequence[Part]) -> tuple[torch.Tensor, ...]:
            return cut_parts(of[id(group)], group, parts)

        self._runner.apart.step(sub_groups, 1.0 / announced.grad_scale, announced.inner_step, gradients)
        _note_stepped(groups)

    # At the step ------------------------------------------------------------------------------------------------------

    def complete(self, grad_scale: float, max_norm: float | None) -> frozenset[int]:
        """To be called in the step, when all reductions are complete: wait for the worker thread. Returns the
        sub-groups that were stepped already (collective).

        Raises:
            ZeroStateError: a rank's worker has failed, or something was changed since the announcement.
        """
        if self._early():
            self._worker.submit(self._runner.apart.end)
        failure, announced = self._worker.wait(), self._announced
        problem = self._disturbed
        if failure is not None:
            problem = f"the step of a unit during backward failed: {type(failure).__name__}: {failure}"
        elif announced is not None and self._stepped:
            changes = self._changes(announced, grad_scale, max_norm)
            problem = problem or next(changes, None)
        if problem is not None and not self._early():
            self._stop_early_steps(problem)
            problem = None
        elif problem is not None and failure is None:
            problem = f"{problem}, but units were stepped during backward: {_REMEDY}"
        if self._asks:
            raise_on_all_ranks(self._channel, self._runtime.ranks, problem, failure)
        return frozenset(number for unit in self._early() for number in self._sub_groups[unit])

    def _changes(self, announced: _Announced, grad_scale: float, max_norm: float | None) -> Iterator[str]:
        """Descriptions of what was changed since the announcement and would give other values."""
        if grad_scale != announced.grad_scale:
            yield f"got grad_scale={grad_scale}, expected the announced {announced.grad_scale}"
        if max_norm:
            yield f"got max_norm={max_norm}, which needs the norm of the gradients before the first update"
        if not same_settings(announced.settings, settings_of(self._inner)):
            yield "the settings of the parameter groups (lr, ...) were changed between backward and step"
        for unit, groups in self._stepped.items():
            now = self._runtime.gradients.reduced(unit)
            dropped = any(home is not entry.gradients for entry, (_, home, _) in zip(groups, now, strict=True))
            if dropped or any(entry.was_written() for entry in groups):
                yield f"gradients or masters of unit {self._names[unit]} were written between backward and step"
            if self._edits.were_written([entry.group for entry in groups]):
                yield f"parameters of unit {self._names[unit]} were written between backward and step"

    def groups(self) -> frozenset[FlatGroup]:
        """The flat groups whose masters were stepped during backward."""
        return frozenset(entry.group for unit in self._early() for entry in self._stepped[unit])

    def _early(self) -> Collection[int]:
        """The units whose masters were stepped during this backward; none in a trial."""
        return () if self._announced is None or self._announced.trial else self._stepped

    def end_step(self) -> None:
        """Say that the step has ended."""
        if self._announced is not None and self._stepped:
            self._trials = max(0, self._trials - 1)
        self._asks = self._was_announced or self._runtime.ranks.size == 1
        self._was_announced = False
        self._forget()

    def join(self) -> None:
        """Wait until the thread has stepped what it was given so far."""
        self._worker.join()

    def abandon(self) -> None:
        """Forget the step that has begun, because masters and states are about to get other values."""
        self._worker.wait()
        self._runner.apart.forget()
        self._forget()

    def _forget(self) -> None:
        self._announced, self._disturbed = None, None
        self._stepped = {}

    # What was seen ----------------------------------------------------------------------------------------------------

    def check_ended(self) -> None:
        """Refuse to read masters and states while only some of them were stepped. Raises ZeroStateError."""
        if self._early():
            raise ZeroStateError(
                "masters and optimizer states of some units belong to the step that was begun during backward, and"
                " those of others do not; call step() first, or set"
                " zero_optimization.offload_optimizer.step_during_backward to false"
            )

    def check_not_begun(self) -> None:
        """Refuse another backward after units were stepped. Raises ZeroStateError."""
        if self._early():
            raise ZeroStateError(f"{self._disturbed}, but units were stepped during backward: {_REMEDY}")

    def _report_disturbance(self, what: str) -> None:
        """Remember the first event that makes an early step wrong; `complete` acts on it."""
        self._disturbed = self._disturbed or what

    def _stop_early_steps(self, why: str) -> None:
        """Do not step early from now on."""
        if not self._only_afterwards:
            self._only_afterwards = True
            _log.info("units are stepped after backward, not during it: %s", why)


def _wait_for_gradients(groups: Sequence[_Group]) -> None:
    """Wait until the reduced gradients are in their homes."""
    for entry in groups:
        if entry.arriving is not None:
            entry.arriving.synchronize()


def _note_stepped(groups: Sequence[_Group]) -> None:
    """The masters have the values that they keep until the step: remember their versions."""
    for entry in groups:
        entry.note_stepped()
