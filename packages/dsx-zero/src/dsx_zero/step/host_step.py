"""The CPU optimizer step beside the device's work: during backward (decision 0065), or one step late (0043).

*During backward.* `announce` says that the coming backward is the last one before the step. When the last reduction of
a unit is complete, the thread steps the unit's masters, in host memory or on disk. The parameters keep their old values
until `step()`: backward, other ranks' gathers and the user see the values from before the update (`host_thread`). The
result is bitwise identical to a step after backward: a unit is stepped only after all ranks have said, together with
the unit's reduction, that it was the last one, and with the settings (learning rates) of the announcement.

Where the step clips or checks for overflow, the norm decides on the update, and it is known when backward has ended.
There the thread *speculates* that gradients are neither clipped nor infinite, and keeps what it overwrites. In `step`
the updates are kept, or undone bit by bit and made again with the right factor. A step after one that was clipped or
skipped is not announced to the thread. An update that can be undone is also undone wherever something that it rests on
is read or changed between backward and step (learning rates, gradients, parameters, a checkpoint, another backward).
Units are stepped after backward from then on.

Without clipping and check there is nothing to undo, and nothing is kept. There such a change makes `step` raise, and
the first announced steps are trials: nothing is stepped early in them, and a loop that makes such changes is found.

*One step late*, for those who ask for it: after `late_after` steps, step n waits for the update with the gradients of
step n - 1 and makes its parameters visible (`finish_late`), and gives the thread the gradients of step n with the
settings, clipping and loss scale of step n (`begin_late`). It works on copies, because the next backward writes into
the gradients' memory. The steps before are stepped during backward, by the same thread.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import torch

from ..errors import ZeroStateError
from ..order.channel import Answer, Asks
from ..params.flat import FlatGroup
from ..runtime import Runtime
from .edits import Edits
from .failures import is_full, raise_on_all_ranks
from .host_thread import worker_beside
from .inner import has_reciprocal, has_step_hooks, settings_of
from .norm import usual_factor
from .runner import StepRunner
from .stepped import (
    AnnouncedStep,
    KeptGradients,
    SteppedGroup,
    gradients_in,
    note_stepped,
    wait_for_gradients,
    writes_since,
)

__all__ = ["HostSteps"]

_log = logging.getLogger(__name__)

_TRIALS = 2
"""Announced steps in which nothing is stepped early, where a step cannot be undone."""

_MOST_UNDONE = 2
"""The number of early steps that may be undone because values were read or changed; then there are no more."""

_REMEDY = (
    "do it before the last backward of an update or after step(), or set"
    " zero_optimization.offload_optimizer.step_during_backward to false. This step was begun and cannot be completed:"
    " load a checkpoint to go on"
)

_OVERWRITTEN = (
    "parameters were written while their update was under way on the host, which would overwrite them; call"
    " synchronize() of the optimizer on every rank before writing, or set"
    " zero_optimization.offload_optimizer.late_update_after to null"
)


class HostSteps:
    """Steps masters on a thread of the host: a unit as soon as its last reduction is complete, while backward goes on;
    or all of them one step late.

    Args:
        runner: executes the step; no sub-group of `runner.apart.plan` spans two units.
        units: the units that may be stepped early where the step needs no norm.
        undoable: the units that may be stepped early where it does.
        norm_on_host: whether the step's clipping is computed on the host.
        channel: asks a yes-or-no question of all ranks.
        late_after: steps after which updates are applied one step late; None: never.
    """

    def __init__(
        self,
        runtime: Runtime,
        runner: StepRunner,
        edits: Edits,
        *,
        units: Collection[int],
        undoable: Collection[int],
        norm_on_host: bool,
        channel: Asks,
        inner: Any,
        late_after: int | None = None,
    ) -> None:
        self._runtime, self._runner, self._edits, self._channel, self._inner = runtime, runner, edits, channel, inner
        self._units, self._undoable, self._norm_on_host = frozenset(units), frozenset(undoable), norm_on_host
        self._sub_groups = {unit: runner.sub_groups_of(unit) for unit in {*units, *undoable}}
        self._by_flat = hasattr(inner, "step_flat")
        """Whether the optimizer's kernels only read gradients and release Python's lock. Another optimizer may hold it
        while the user's code waits and goes on, so that its steps can always be undone.
        """
        self._names = {unit.index: str(unit.plan) for unit in runtime.units}
        self._worker, self._was_announced = worker_beside(runtime), False
        self._announced: AnnouncedStep | None = None
        self._asks = runtime.ranks.size == 1
        """Whether each reduction also asks all ranks: from the step after the first announced one, on every rank."""
        self._answers: dict[int, Answer] = {}
        self._stepped: dict[int, tuple[SteppedGroup, ...]] = {}
        """By unit: the groups that the worker steps. In a trial nothing is stepped, and these are only watched."""
        self._trials, self._undone, self._only_afterwards = _TRIALS, 0, False
        self._plain, self._usual = False, 1.0
        """Whether the last step was neither clipped nor skipped; what the gradients of the announced step are
        multiplied with, unless it is clipped.
        """
        self._disturbed: str | None = None
        self._late_after, self.under_way, self.kept = late_after, False, KeptGradients()
        if self._sub_groups:
            runtime.gradients.reductions.watch = self
        before_edit = weakref.WeakMethod(self.before_edit)
        for group in (group for unit in runtime.trainable_units() for group in unit.trainable):
            group.before_edit = lambda: None if (call := before_edit()) is None else call()

    # Before and during backward ---------------------------------------------------------------------------------------

    def announce(self, grad_scale: float, max_norm: float | None) -> bool:
        """Say that the coming backward is the last one before `step(grad_scale=..., max_norm=...)`, whose update is not
        a late one. Returns whether units will be stepped during it.
        """
        if not self._sub_groups or self.under_way:
            return False
        self._runtime.gradients.expect_last()
        self._was_announced = True
        if self._announced is not None:
            self._disturb("more than one backward was announced as the last before the step")
        undoable = bool(max_norm) or self._runtime.checks_overflow or not self._by_flat
        units = self._undoable if undoable else self._units
        factor = self._usual = usual_factor(grad_scale, max_norm, on_host=self._norm_on_host)
        if self._only_afterwards or not units or not has_reciprocal(factor) or has_step_hooks(self._inner):
            return False
        if undoable and not self._plain:
            return False
        settings = settings_of(self._inner)
        inner_step, trial = self._runner.inner_step.for_twin(settings), self._trials > 0 and not undoable
        self._announced = AnnouncedStep(grad_scale, factor, settings, inner_step, units, undoable, trial)
        return not trial

    def begin_backward(self) -> None:
        """See `ReductionWatch`: units that are stepped already must not get other gradients."""
        if self._stepped:
            self._disturb("a backward came after the one that was said to be the last before the step")
            self.check_not_begun()

    def started(self, unit: int) -> None:
        """See `ReductionWatch`."""
        if unit in self._stepped and self._announced is not None and self._announced.trial:
            del self._stepped[unit]  # it was not the last one, and the ranks would have said so
        elif unit in self._stepped:
            self._disturb(f"the gradients of unit {self._names[unit]} were reduced again after its step")
        if self._asks:
            self._answers[unit] = self._channel.ask(self._runtime.gradients.is_final(unit))

    def finished(self, unit: int) -> None:
        """See `ReductionWatch`."""
        answer, announced = self._answers.pop(unit, None), self._announced
        final = answer is not None and answer.get()
        if announced is None or unit not in announced.units or unit in self._stepped:
            return
        if not (final or announced.trial):
            return
        groups = tuple(SteppedGroup(*found) for found in self._runtime.gradients.reductions.reduced(unit))
        self._stepped[unit] = groups
        if announced.trial:
            wait_for_gradients(groups)
            note_stepped(groups)
        else:
            self._worker.submit(lambda: self._step(self._sub_groups[unit], groups, announced))

    def _step(self, sub_groups: Sequence[int], groups: Sequence[SteppedGroup], announced: AnnouncedStep) -> None:
        """Step the masters of a unit. Runs on the worker thread."""
        wait_for_gradients(groups)
        self._edits.take_over([entry.group for entry in groups])
        homes = {entry.group: entry.gradients for entry in groups}
        gradients = gradients_in(homes, self._runner.blocks, self._inner, copied=not self._by_flat)
        self._runner.apart.step(
            sub_groups, announced.factor, announced.inner_step, gradients, keep_old=announced.undoable
        )
        note_stepped(groups)

    # At the step ------------------------------------------------------------------------------------------------------

    def complete(self, grad_scale: float, max_norm: float | None) -> None:
        """To be called in the step, when all reductions are complete: wait for the worker thread (collective).

        Raises:
            ZeroStateError: a rank's worker has failed; or something was changed since the announcement, in a step that
                cannot be undone. A step that can be undone is undone on every rank then, and may be made again.
        """
        if self.under_way:  # nothing was announced; `finish_late` waits
            return
        failure, announced = self._end_early(), self._announced
        problem = self._disturbed
        if failure is not None:
            problem = f"the step of a unit during backward failed: {type(failure).__name__}: {failure}"
        elif announced is not None and self._stepped:
            now = settings_of(self._inner)
            writes = writes_since(self._stepped, self._runtime.gradients.reductions, self._edits, self._names)
            changes = chain(announced.differences(grad_scale, max_norm, now), writes)
            problem = problem or next(changes, None)
        if problem is not None and self._is_undoable():
            self._undo(problem, for_good=True)
            problem = problem if failure is not None and not is_full(failure) else None
        elif problem is not None and not self._early():
            self._stop_early_steps(problem)
            problem = None
        elif problem is not None and failure is None:
            problem = f"{problem}, but units were stepped during backward: {_REMEDY}"
        if self._asks:
            try:
                raise_on_all_ranks(self._channel, self._runtime.ranks, problem, failure)
            except ZeroStateError:
                if self._is_undoable():
                    self._undo("another rank's step failed", for_good=False)
                raise

    def conclude(self, factor: float | torch.Tensor | None) -> tuple[frozenset[int], float | torch.Tensor | None]:
        """The norm is known: keep what was stepped during backward if the right factor was taken, else undo it.

        Args:
            factor: what the gradients are to be multiplied with; None: the step is skipped.

        Returns:
            The sub-groups that were stepped already, and `factor`, on the host if it was read.
        """
        if not self._was_announced:
            return frozenset(), factor
        if isinstance(factor, torch.Tensor):
            factor = factor.item()  # the host steps these masters, and needs the number anyway
        announced, self._plain = self._announced, factor == self._usual
        if announced is not None and announced.undoable and self._early():
            if factor == announced.factor:
                self._runner.apart.settle()
            else:
                self._undo("the gradients were clipped, or not finite", for_good=False)
        return frozenset(number for unit in self._early() for number in self._sub_groups[unit]), factor

    def groups(self) -> frozenset[FlatGroup]:
        """The flat groups whose masters were stepped during backward."""
        return frozenset(entry.group for unit in self._early() for entry in self._stepped[unit])

    def _early(self) -> Collection[int]:
        """The units whose masters were stepped during this backward; none in a trial."""
        return () if self._announced is None or self._announced.trial else self._stepped

    def _is_undoable(self) -> bool:
        return self._announced is not None and self._announced.undoable

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
        self._end_early()
        if self._is_undoable():
            self._runner.apart.undo()
        self._runner.apart.forget()
        self.under_way = False
        self._forget()

    def _forget(self) -> None:
        self._announced, self._disturbed = None, None
        self._stepped = {}

    # One step late ----------------------------------------------------------------------------------------------------

    def is_late(self, steps: int) -> bool:
        """Whether the next update is applied late, when `steps` steps were done. One that was announced is not."""
        return self._late_after is not None and steps >= self._late_after and not self._was_announced

    def begin_late(self, factor: float | torch.Tensor) -> None:
        """Start the update with the reduced gradients times `factor`."""
        number = factor.item() if isinstance(factor, torch.Tensor) else factor
        apart = self._runner.apart
        apart.drop_copies()  # a late update is not undone
        apart.hold_parameters()
        self.kept.take(self._runtime)
        gradients = gradients_in(self.kept.homes, self._runner.blocks, self._inner)
        inner_step = self._runner.inner_step.for_twin(settings_of(self._inner))

        def update() -> None:
            apart.step(range(len(apart.plan.sub_groups)), number, inner_step, gradients)
            apart.end()

        self.under_way = True
        self._worker.submit(update)

    def finish_late(self) -> bool:
        """Wait for the update that is under way and write the parameters (collective). Returns False if there was none.

        Raises:
            ZeroStateError: a rank's update has failed, or parameters were written meanwhile.
        """
        if not self.under_way:
            return False
        failure, problem = self._worker.wait(), None
        if failure is not None:
            problem = f"the update of the step before failed: {type(failure).__name__}: {failure}"
        elif self._edits.were_written():
            problem = _OVERWRITTEN
        raise_on_all_ranks(self._channel, self._runtime.ranks, problem, failure)
        self.under_way = False
        self._runner.apart.settle()
        self._runner.run(1.0, range(len(self._runner.apart.plan.sub_groups)))
        return True

    # What was seen ----------------------------------------------------------------------------------------------------

    def check_ended(self) -> None:
        """Refuse to read or write masters and states while the thread steps them. Where only some of them were stepped,
        undo these steps if that is possible. Raises ZeroStateError.
        """
        if self.under_way:
            raise ZeroStateError(
                "the update of the last step is under way on the host (offload_optimizer.late_update_after); call"
                " synchronize() of the optimizer on every rank first (an engine does it before it saves)"
            )
        if not self._early():
            return
        if self._is_undoable():
            self._undo("masters or optimizer states were used between backward and step", for_good=False, counts=True)
            return
        raise ZeroStateError(
            "masters and optimizer states of some units belong to the step that was begun during backward, and"
            " those of others do not; call step() first, or set"
            " zero_optimization.offload_optimizer.step_during_backward to false"
        )

    def before_edit(self) -> None:
        """A user's edit is about to be written into masters: undo early steps, where that is possible.

        Raises:
            ZeroStateError: the thread steps these masters for a late update.
        """
        if self.under_way:
            raise ZeroStateError(_OVERWRITTEN)
        if self._early() and self._is_undoable():
            self._undo("parameters were written between backward and step", for_good=False, counts=True)

    def check_not_begun(self) -> None:
        """Refuse another backward after units were stepped. Raises ZeroStateError."""
        if self._early():
            raise ZeroStateError(f"{self._disturbed}, but units were stepped during backward: {_REMEDY}")

    def _disturb(self, what: str) -> None:
        """Something makes early steps wrong: undo them, or remember the first such event for `complete`."""
        if self._early() and self._is_undoable():
            self._undo(what, for_good=False, counts=True)
        else:
            self._disturbed = self._disturbed or what

    def _end_early(self) -> BaseException | None:
        """Wait until the thread has nothing more to do. Returns its failure, if there is one."""
        if self._early():
            self._worker.submit(self._runner.apart.end)
        return self._worker.wait()

    def _undo(self, why: str, *, for_good: bool, counts: bool = False) -> None:
        """Undo what was stepped early in this step; the step will be made after backward. `for_good`: so will all later
        ones; `counts`: if that has happened often.
        """
        self._end_early()
        self._runner.apart.undo()
        self._forget()
        self._undone += counts
        if for_good or self._undone >= _MOST_UNDONE:
            self._stop_early_steps(why)

    def _stop_early_steps(self, why: str) -> None:
        """Do not step early from now on."""
        if not self._only_afterwards:
            self._only_afterwards = True
            self._runner.apart.drop_copies()
            _log.info("units are stepped after backward, not during it: %s", why)
