"""The update: between which two updates the ranks stop together, what an update does, and the learning rates after it.

The stepper's order is: unscale, check, clip, step, drop the gradients, adapt the loss scale. The sharded optimizer does
the arithmetic; this module fixes the order and the scale. Gradients are divided by the loss scale of their backward,
times the scale of weighted micro-batches. The scaler is told the outcome afterwards, so that the step at which the
scale grows is not divided by the new value.

A schedule is stepped once per applied update, and not for a skipped one. The schedules of torch and of
`dsx.lr_schedules` set the rate of the first update in their constructor, so nothing has to be done before the first
update.

`StepGate`: points between two updates at which all ranks stop together, agreed on by threads while training goes on.
Some actions must happen on every rank between the same two updates: raising the error of an asynchronous save, or
saving and ending because of a signal. A thread of each rank has such an action, and the threads call `agree` together.
Each thread says which update its rank has begun last; the action is due on every rank after the latest of these
updates. A rank that is about to begin an update while its thread is asking waits for the answer. The answer takes one
exchange of numbers between threads, and never depends on the training of another rank.

So no rank begins an update in which others do not take part, and no collective waits for ever: a rank that has begun an
update ends it, and a rank that is behind catches up, because some rank has begun the updates up to that point.
Evaluation changes nothing, so a rank may also stop in the middle of an evaluation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from ..loss_scaler import LossScale
from .errors import EngineArgumentError, EngineError
from .report import Counters


def learning_rates(groups: list[dict[str, Any]]) -> list[float]:
    """Learning rate of each parameter group. NaN for a group that has none: an optimizer without rates, or one that
    computes its rates itself (Adafactor's `lr=None`). A zero would say that it does not train.
    """
    return [float("nan") if group.get("lr") is None else float(group["lr"]) for group in groups]


class _Gatherer(Protocol):
    def gather(self, value: int) -> list[int]: ...


class StepGate:
    """Stops one rank's training at the update that the threads of all ranks have agreed on.

    Args:
        counters: their `global_steps` says how many updates are over.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._changed = threading.Condition()
        self._running: int | None = None  # the number of the update that was begun and is not over
        self._asking = 0
        self._due: list[tuple[int, Callable[[], None]]] = []

    def agree(self, ranks: _Gatherer, action: Callable[[], None]) -> int:
        """Let every rank's training thread run `action` after the same update; returns the number of that update.
        Collective over the calling threads. A thread that trains must not call it.
        """
        with self._changed:
            self._asking += 1
            # Not from the counters: at the end of an update it is counted already, while observers still run.
            begun = self._counters.global_steps if self._running is None else self._running
        try:
            last = max(ranks.gather(begun))
            with self._changed:
                self._due.append((last, action))
            return last
        finally:
            with self._changed:
                self._asking -= 1
                self._changed.notify_all()

    def begin_update(self) -> None:
        """Run actions that are due. After that no rank stops before this update is over. A second call within an update
        does nothing.
        """
        if self._running is not None:
            return
        with self._changed:
            while self._asking:
                self._changed.wait()
            if not self._is_due():
                self._running = self._counters.global_steps + 1
                return
        self.at_rest()
        self.begin_update()

    def end_update(self) -> None:
        """Run the actions that are due after this update."""
        self._running = None
        self.at_rest()

    def abandon_update(self) -> None:
        """Drop the update that was begun; another one may begin."""
        self._running = None

    def at_rest(self) -> None:
        """Run actions that are due, unless an update is under way."""
        while self._running is None:
            with self._changed:
                found = next((one for one in self._due if one[0] <= self._counters.global_steps), None)
                if found is None:
                    return
                self._due.remove(found)
            found[1]()

    def _is_due(self) -> bool:
        return any(last <= self._counters.global_steps for last, _ in self._due)


class StepOutcome(Protocol):
    """The result of a sharded optimizer's step."""

    @property
    def overflow(self) -> bool: ...

    @property
    def grad_norm(self) -> float | None: ...


class Stepper(Protocol):
    """Does one update; the engine calls it at each accumulation boundary."""

    def before_last_backward(self) -> None: ...

    def step(self) -> StepOutcome: ...


class ShardedStepper:
    """Updates through a `dsx_zero.ZeroOptimizer`.

    Args:
        optimizer: the sharded optimizer.
        scaler: the loss scale.
        max_norm: clip the global L2 norm of the gradients to this; None: no clipping.
        gradient_scale: returns the factor by which gradients are too large, besides the loss scale
            (`Batches.gradient_scale`).
        known_before: the gradient scale and the learning rates are known before the last backward of an update.
        counters: their `global_steps` says how many updates are over.
    """

    def __init__(
        self, optimizer: Any, scaler: LossScale, max_norm: float | None,
        gradient_scale: Callable[[], float] = lambda: 1.0, *, known_before: bool = False,
        counters: Counters | None = None,
    ) -> None:  # fmt: skip
        self._optimizer, self._scaler, self._max_norm = optimizer, scaler, max_norm
        self._gradient_scale, self._counters = gradient_scale, counters
        self._announces = known_before

    def before_last_backward(self) -> None:
        """Called before the last backward of an update. Units may be stepped during it, if everything but the norm is
        known before.
        """
        if self._announces:
            self._count_steps()
            scale = self._scaler.scale * self._gradient_scale()
            self._optimizer.step_during_backward(grad_scale=scale, max_norm=self._max_norm)

    def _count_steps(self) -> None:
        """Whether an update is a late one depends on how many there were, also in a run that was resumed."""
        if self._counters is not None:
            self._optimizer.steps_done = self._counters.global_steps

    def step(self) -> StepOutcome:
        """Do one update. On overflow only the loss scale changes, and the gradients are dropped."""
        self._count_steps()
        scale = self._scaler.scale * self._gradient_scale()
        outcome = self._optimizer.step(grad_scale=scale, max_norm=self._max_norm)
        self._optimizer.zero_grad()
        if self._scaler.checks_overflow:
            self._scaler.update(outcome.overflow)
        return outcome


class NoStepper:
    """The stepper of an engine without an optimizer."""

    def before_last_backward(self) -> None:
        """Does nothing; `step` raises."""

    def step(self) -> StepOutcome:
        """Refuse.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            "step(): this engine has no optimizer; pass optimizer=... to dsx.initialize or set optimizer.type in the"
            " config"
        )


class Scheduler(Protocol):
    """A learning-rate scheduler, as torch's are."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...

    def get_last_lr(self) -> list[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class ScheduleDriver:
    """The calls that the engine makes to a scheduler. Without one (None) learning rates stay as they are."""

    def __init__(self, scheduler: Scheduler | None) -> None:
        self.scheduler = scheduler

    def step(self, **kwargs: Any) -> None:
        """Set the learning rates of the next update. Without a scheduler arguments are refused, because they would have
        no effect.
        """
        if self.scheduler is not None:
            self.scheduler.step(**kwargs)
        elif kwargs:
            raise EngineArgumentError(
                f"step(lr_kwargs={kwargs!r}): this engine has no learning-rate scheduler to pass them to"
            )

    def state_dict(self) -> dict[str, Any]:
        """The state of the scheduler; empty without one."""
        return {} if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scheduler. A state that was saved without one, or is loaded without one, changes nothing."""
        if state and self.scheduler is not None:
            self.scheduler.load_state_dict(state)
