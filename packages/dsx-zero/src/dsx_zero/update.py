"""`Update`: what `ZeroOptimizer.step` does, in one layout of the model; and whether a step may be made now.

An update finishes the reductions, computes norm and overflow in one pass, steps the inner optimizer on the masters with
unscaling and clipping as one factor (inside its kernel if it accepts one), writes the low-precision copy, and gathers
the parameters that other ranks updated.

A model that is laid out anew (`replanning`) gets another object. What goes on from layout to layout is given to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .assembling import StepParts
from .errors import ZeroStateError
from .params.partitioned_unit import is_partitioned
from .state.layout import ModelLayout
from .state.moving import MovedStates, OffloadStateTypeEnum
from .step.edits import EditAgreement, Edits
from .step.host_step import HostSteps
from .step.model_check import Frozen, ModelCheck
from .step.nonfinite import NonFiniteWarning
from .step.norm import StepNorm, clip_factor
from .step.runner import StepFailure, StepRunner
from .step.segments import connect_norms

__all__ = ["StepOutcome", "Update"]


class StepOutcome:
    """The outcome of one step.

    Attributes:
        overflow: gradients were not finite and nothing was changed.
        loss: the value that the closure returned, if there was one.
    """

    __slots__ = ("_norm", "loss", "overflow")

    def __init__(self, overflow: bool, norm: torch.Tensor | float | None, loss: Any = None) -> None:
        self.overflow = overflow
        self._norm = norm
        self.loss = loss

    def with_loss(self, loss: Any) -> StepOutcome:
        """The same, with the value of a closure, which may hold a graph."""
        return StepOutcome(self.overflow, self._norm, loss)

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm before clipping. Reading it waits for the device, which `step` itself does not do."""
        if isinstance(self._norm, torch.Tensor):
            self._norm = self._norm.item()
        return self._norm

    def __repr__(self) -> str:
        return f"StepOutcome(overflow={self.overflow}, grad_norm={self.grad_norm})"


class Update:
    """Updates one model in one layout.

    Args:
        inner: the user's optimizer.
        failure: collects what fails in a step.
        nonfinite: warns of norms that are not finite.
        moved: whether a parameter belongs to another sharded model now.

    Attributes:
        refusal: why a step, and what reads or writes the states, has to raise now; None: it need not.
        host_steps: steps masters beside the device's work; None: every step is made in `apply`.
        applies_late: whether updates are applied a step later, from some step on (`late_update_after`).
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        parts: StepParts,
        layout: ModelLayout,
        *,
        failure: StepFailure,
        nonfinite: NonFiniteWarning,
        moved: Callable[[torch.Tensor], bool],
    ) -> None:
        runtime, masters, faces = parts.runtime, parts.masters, parts.faces
        flat = [group for unit in runtime.units for group in unit.groups]
        self.refusal: str | None = None
        self._runtime, self._groups, self._unused = runtime, parts.groups, parts.unused
        self._failure, self._nonfinite = failure, nonfinite
        devices = {unit.groups[0].key.device for unit in runtime.trainable_units()}
        self._norm = StepNorm(runtime, next(iter(devices), torch.device("cpu")), failure, parts.agreement_group)
        held = frozenset(layout.names[id(p)] for group in parts.groups.shown for p in group if id(p) in layout.names)
        self.frozen = Frozen(flat, masters, held, faces)
        self.runner = StepRunner(
            inner,
            runtime,
            masters,
            groups=parts.groups,
            frozen=self.frozen,
            states=parts.states,
            failure=failure,
            plan=parts.plan,
            apart_plan=parts.apart_plan,
            lane=parts.lane,
            matrices=parts.matrices,
        )
        self.moved = MovedStates(runtime, parts.states)
        self.edits = Edits(flat, data_writes=parts.data_writes)
        self.applies_late = parts.late_after is not None
        self.host_steps: HostSteps | None = None
        if parts.early_units or parts.undoable_units or self.applies_late:
            self.host_steps = HostSteps(
                runtime,
                self.runner,
                self.edits,
                units=parts.early_units,
                undoable=parts.undoable_units,
                norm_on_host=self._norm.on_host,
                channel=parts.channel,
                inner=inner,
                late_after=parts.late_after,
            )
        self.agreement = EditAgreement(flat, runtime.ranks)
        runtime.gradients.order.watch_edits(self.agreement)
        self._stepped_in_place = [p for g in flat if g.trainable and not is_partitioned(g) for p in g.parameters]
        self._model_check = ModelCheck(
            runtime.model, flat, faces={key: id(face) for key, face in faces.items()}, moved=moved
        )
        connect_norms(inner, runtime, masters)

    # Whether it may be made now, and values may be read or written ----------------------------------------------------

    def check_usable(self) -> None:
        """Refuse everything where there is a `refusal`. Raises ZeroStateError."""
        if self.refusal is not None:
            raise ZeroStateError(self.refusal)

    def check_in_use(self) -> None:
        """Refuse what needs all states on the device, too. Raises ZeroStateError."""
        self.check_usable()
        if self.moved.stashes:
            self.moved.check()

    def check(self) -> None:
        """Check what a step needs before it communicates. Raises what `ZeroOptimizer.step` raises then."""
        self.check_in_use()
        self._model_check.check()
        self._groups.check()
        self.frozen.check()

    def check_ended(self) -> None:
        """Refuse to read or write masters and states that a thread steps. Raises ZeroStateError."""
        if self.host_steps is not None:
            self.host_steps.check_ended()

    def check_model(self) -> None:
        """Compare the model with what was sharded. Everything that reads or writes the states for checkpoints does it.

        Raises:
            ZeroStateError: a parameter or its memory was replaced, added or removed; names it. Or states are offloaded,
                or a step has begun and not ended.
        """
        self.moved.check()
        self.check_ended()
        self._model_check.check()

    def check_readable(self) -> None:
        """Check what reading parameters from outside needs, also while states are offloaded.

        Raises:
            ZeroStateError: there is a `refusal`, a step has begun and not ended, or parameters were replaced.
        """
        self.check_usable()
        if self.moved.stashes:
            self.check_ended()
        else:
            self.check_model()

    def collect_edits(self) -> None:
        """Before this rank's values are read: check that they are the model's, and let masters follow edits."""
        self.check_readable()
        if not self.moved.stashes:
            self.edits.take_over()
            return
        parameters_away = OffloadStateTypeEnum.lp_params in self.moved.stashes  # so they cannot have been written
        if self._runtime.averaging is not None or (not parameters_away and self.edits.were_written()):
            self.moved.check()

    @contextmanager
    def refused(self, why: str) -> Iterator[None]:
        """Inside the context `why` is the `refusal`."""
        before, self.refusal = self.refusal, why
        try:
            yield
        finally:
            if self.refusal == why:
                self.refusal = before

    # Its parts, in the order of a step --------------------------------------------------------------------------------

    def announce(self, grad_scale: float, max_norm: float | None, steps: int) -> bool:
        """See `ZeroOptimizer.step_during_backward`. `steps`: those that were done so far."""
        self.check_in_use()
        self._groups.check()
        self.frozen.check()
        beside = self.host_steps
        return beside is not None and not beside.is_late(steps) and beside.announce(grad_scale, max_norm)

    def measure(self, grad_scale: float, max_norm: float | None, steps: int) -> tuple[torch.Tensor, bool, bool]:
        """Complete the gradients and get their norm (collective). `steps`: those that were done so far.

        Returns:
            The norm, whether it is of this rank's own gradients, and whether the update is applied a step later.
        """
        self._failure.begin()
        if self._unused is not None:
            self._unused.check()
        run, beside, local = self._runtime, self.host_steps, False
        if run.averaging is not None:
            run.averaging.announce_clipping(max_norm)
            local = run.averaging.local()
        taken = beside is not None and (beside.under_way or bool(beside.groups()) or beside.is_late(steps))
        if self.runner.blocks is not None and not taken:  # a disk is busy while the norm is computed
            self._failure.run(self.runner.read_ahead, None)
        self._norm.finish_gradients(local=local)
        if beside is not None:
            beside.complete(grad_scale, max_norm)
        norm = self._norm.norm(grad_scale, needed=bool(max_norm) or run.checks_overflow or not local, local=local)
        return norm, local, beside is not None and beside.is_late(steps)

    def apply(
        self, norm: torch.Tensor, *, grad_scale: float, max_norm: float | None, local: bool, late: bool
    ) -> StepOutcome:
        """Step the masters and publish the parameters, unless the norm says that gradients are not finite (collective).

        Args:
            norm, local, late: what `measure` returned.
            grad_scale, max_norm: as for `measure`.
        """
        self.finish_late()
        run = self._runtime
        if run.checks_overflow:
            everywhere = (self._norm.sum_over_ranks(norm) if local else norm).cpu()  # waits, unless it is there already
            if not local:
                norm = everywhere  # the rest of the step uses what the host has read
            if not torch.isfinite(everywhere).item():
                self._conclude(None)
                self.runner.forget_ahead()
                self._end()
                return StepOutcome(True, everywhere)
        self._nonfinite.steps += 1
        if norm.device.type != "cpu" or not math.isfinite(norm.item()):
            self._nonfinite.look(run, norm, everywhere=not local)
        factor = self._failure.run(lambda: clip_factor(norm, grad_scale, max_norm), 1.0)
        stepped, factor = self._conclude(factor)
        self._step(factor, stepped, late=late)
        self._end()
        return StepOutcome(False, None if local else norm)

    def _conclude(self, factor: Any) -> tuple[Collection[int], Any]:
        """See `HostSteps.conclude`."""
        return ((), factor) if self.host_steps is None else self.host_steps.conclude(factor)

    def _step(self, factor: float | torch.Tensor, stepped: Collection[int], *, late: bool) -> None:
        """Step the masters with the gradients times `factor`, and publish them; or begin to, for the next step."""
        if late and self.host_steps is not None:
            self.edits.take_over()
            self.host_steps.begin_late(factor)
            return
        edited = self.edits.groups
        if self.host_steps is not None:  # edits of groups that were stepped already were taken over before
            done = self.host_steps.groups()
            edited = [group for group in edited if group not in done]
        self._failure.run(lambda: self.edits.take_over(edited), None)
        self.runner.run(factor, stepped)
        self._runtime.publisher.finish()
        self.note_written()

    def _end(self) -> None:
        self._failure.end()
        if self.host_steps is not None:
            self.host_steps.end_step()

    def finish_late(self) -> None:
        """Write the parameters of an update that was left for the next step (collective)."""
        if self.host_steps is not None and self.host_steps.finish_late():
            self._runtime.publisher.finish()
            self.note_written()

    def note_written(self) -> None:
        """Parameters have new values that the user did not write: earlier graphs are stale, as after a step of a
        plain optimizer.
        """
        torch.autograd.graph.increment_version(self._stepped_in_place)
        self.edits.settle()
        self.agreement.settle()

    def abandon(self) -> None:
        """Forget a step that has begun, because masters and states are about to get other values."""
        if self.host_steps is not None:
            self.host_steps.abandon()
