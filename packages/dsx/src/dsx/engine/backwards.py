"""Backwards between two updates: which micro-batch is the last one, when gradients are reduced, and with which factor.

`Accumulation` counts micro-batches and says which one is at the boundary. `SyncWindow` uses the optimizer's
`no_sync()`: it enters it before a micro-batch's backward and leaves it at the next `step()`. It is not limited to one
call, so it also covers `engine.scale(loss).backward()` and several backwards per micro-batch.

`Backwards` judges backwards that the user starts without the engine: `loss.backward()` instead of
`engine.backward(loss)`. `engine.scale` puts a hook on the loss it returns, so that the engine recognises the backward
of that loss when it begins. Every other backward that gives gradients to the model's parameters has an unscaled loss.
Its gradients are divided by the accumulation steps when they arrive. With a loss scale that is not possible: without
the scale, backward has already lost small gradients. Then such a backward is refused before it has changed anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from .errors import EngineArgumentError, EngineError


class Accumulation:
    """Counts the micro-batches of one update.

    Args:
        steps: micro-batches per update.
        managed: False: every `step()` ends an update, however many micro-batches came before it.
    """

    def __init__(self, steps: int, *, managed: bool = True) -> None:
        self._steps = 0
        self._done = 0
        self._unstepped = 0
        self._default: bool | None = None if managed else True
        self._override = self._default
        self.steps = steps

    @property
    def steps(self) -> int:
        """Micro-batches per update."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        if value < 1:
            raise EngineArgumentError(f"gradient accumulation steps: got {value}, expected at least 1")
        if self._done:
            raise EngineError(
                f"gradient accumulation steps: cannot change from {self._steps} to {value} after {self._done}"
                " micro-batches of an update; change it right after a step() at a boundary"
            )
        self._steps = value

    def is_boundary(self) -> bool:
        """Whether the running micro-batch is the last one before an update."""
        if self._override is not None:
            return self._override
        return self._done + 1 >= self._steps

    def restart(self) -> None:
        """Begin an update: the micro-batches so far do not count."""
        self._done = self._unstepped = 0

    def override(self, boundary: bool | None) -> None:
        """Set the boundary by hand until the next call; None returns to the configured steps."""
        self._override = self._default if boundary is None else boundary

    def note_backward(self) -> None:
        """Note a backward. A backward before the boundary counts as a micro-batch even if no `step()` follows it."""
        if not self.is_boundary():
            self._unstepped += 1

    def advance(self) -> int:
        """End the running micro-batch.

        Returns:
            How many micro-batches have ended since the last call: one if `step()` follows every micro-batch, and all
            micro-batches of the update if `step()` is called at boundaries only, as Accelerate does.
        """
        boundary = self.is_boundary()
        ended = 1 + self._unstepped if boundary else 1
        self._done = 0 if boundary else self._done + 1
        self._unstepped = 0
        return ended


class SyncWindow:
    """Keeps the optimizer in `no_sync()` while the running micro-batch must only accumulate.

    Args:
        no_sync: the optimizer's context in which backwards accumulate without communication.
        every_micro_batch: True if gradients are reduced in each micro-batch (stages 2-3), False if at boundaries only.
    """

    def __init__(self, no_sync: Callable[[], AbstractContextManager[object]], *, every_micro_batch: bool) -> None:
        self._no_sync = no_sync
        self._every = every_micro_batch
        self._open: AbstractContextManager[object] | None = None
        self._held = 0

    def before_backward(self, *, boundary: bool) -> None:
        """Enter or leave `no_sync()`, as the coming backward needs it."""
        accumulate_only = self._held > 0 or not (boundary or self._every)
        if not accumulate_only:
            self.close()
        elif self._open is None:
            self._open = self._no_sync()
            self._open.__enter__()

    def before_step(self) -> None:
        """End of a micro-batch.

        Raises:
            EngineError: inside `hold()`, where gradients are not reduced and a step would use local ones.
        """
        if self._held:
            raise EngineError(
                "step() inside no_sync(): got gradients that were not reduced over the ranks; "
                "leave the no_sync() block before step()"
            )
        self.close()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Backwards inside the context only accumulate, also at the boundary."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                self.close()

    def close(self) -> None:
        """Leave `no_sync()`."""
        if self._open is not None:
            window, self._open = self._open, None
            window.__exit__(None, None, None)


class LossSum:
    """The sum of the losses of all backwards since the last `take()`, kept on its device.

    The terms are already divided by the accumulation steps, so the sum is the mean loss of the update, also if a
    micro-batch has several losses, each with its own backward.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None

    def add(self, share: torch.Tensor) -> None:
        """Add one detached, unscaled loss, divided by the accumulation steps."""
        value = share.float().reshape(())
        self._sum = value if self._sum is None else self._sum + value

    def take(self) -> torch.Tensor | None:
        """Return the sum as a 0-D fp32 tensor and start again; None if nothing was added."""
        total, self._sum = self._sum, None
        return total


class _ScaledLoss:
    """The hook on a loss of `engine.scale`; lives as long as the loss's graph."""

    def __init__(self, backwards: Backwards) -> None:
        self._backwards = weakref.ref(backwards)

    def __call__(self, grad: torch.Tensor) -> None:
        found = self._backwards()
        if found is not None:
            found.begin_scaled(self)


class _Running:
    """Exists while a backward of a scaled loss runs. Autograd holds it as a callback for the end of the backward, and
    drops its callbacks also when an error ends the backward (see `test_an_error_in_backward_ends_it`).
    """

    def __init__(self, backwards: Backwards) -> None:
        self._backwards = weakref.ref(backwards)

    def __call__(self) -> None:
        """Does nothing: the end of this object marks the end of the backward."""

    def __del__(self) -> None:
        found = self._backwards()
        if found is not None:
            found.end_scaled()


class Backwards:
    """Judges each backward for the sharded gradients (`dsx_zero`'s `BackwardWatch`).

    Args:
        accumulation, window: the objects of the engine.
        scaled_losses: whether there is a loss scale.
        watchers: the engine's hooks and observers; some of them need `engine.backward`.
    """

    def __init__(
        self, accumulation: Accumulation, window: SyncWindow, *, scaled_losses: bool, watchers: Sequence[object]
    ) -> None:
        self._accumulation, self._window, self._scaled_losses = accumulation, window, scaled_losses
        self._need_engine = [type(w).__name__ for w in watchers if getattr(w, "needs_engine_backward", False)]
        self._waiting: weakref.WeakSet[_ScaledLoss] = weakref.WeakSet()
        self._running = 0

    def watch(self, scaled: torch.Tensor) -> None:
        """Recognise the backward of this loss when it begins."""
        hook = _ScaledLoss(self)
        scaled.register_hook(hook)
        self._waiting.add(hook)

    @contextmanager
    def known(self) -> Iterator[None]:
        """Backwards inside the context are of a loss that the engine has scaled (in a pipeline's stages)."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def begin_scaled(self, loss: _ScaledLoss) -> None:
        """The backward of a scaled loss has begun."""
        self._waiting.discard(loss)
        self._running += 1
        torch.autograd.Variable._execution_engine.queue_callback(_Running(self))

    def end_scaled(self) -> None:
        """The backward of a scaled loss has ended, possibly with an error."""
        self._running -= 1

    def _is_scaled(self) -> bool:
        # A scaled loss whose backward has not begun may be part of another: `(engine.scale(loss) +
        # penalty).backward()`.
        return self._running > 0 or len(self._waiting) > 0

    @property
    def refuses(self) -> bool:
        """Whether a backward of an unscaled loss is refused."""
        return self._scaled_losses or bool(self._need_engine)

    @property
    def needed(self) -> bool:
        """Whether a backward of an unscaled loss is refused, or would give other gradients than the engine's."""
        return self.refuses or self._accumulation.steps > 1

    def factor(self) -> float:
        """The factor for the running backward's gradients; 0.0 if `begin` will refuse it."""
        if self._is_scaled():
            return 1.0
        return 0.0 if self.refuses else 1.0 / self._accumulation.steps

    def begin(self) -> float:
        """Called with the first gradient of the running backward; returns the factor for its gradients.

        Raises:
            EngineError: the loss was not scaled although it must be.
        """
        if self._is_scaled():
            return 1.0
        if self._scaled_losses:
            raise EngineError(
                "loss.backward(): the gradients of a loss without the fp16 loss scale were about to be mixed with"
                " scaled ones; call engine.backward(loss), or engine.scale(loss).backward()",
                code="DSX403",
            )
        if self._need_engine:
            raise EngineError(
                f"loss.backward(): {', '.join(self._need_engine)} has to know of every backward; call"
                " engine.backward(loss), or engine.scale(loss).backward()"
            )
        boundary = self._accumulation.is_boundary()
        self._accumulation.note_backward()
        self._window.before_backward(boundary=boundary)
        return self.factor()
