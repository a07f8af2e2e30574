"""Gradient accumulation: which micro-batch is the last before an update, and when gradients are reduced.

Two objects answer these questions. `Accumulation` counts micro-batches and says which one is at the boundary.
`SyncWindow` uses the optimizer's `no_sync()`: it enters it before a micro-batch's backward and leaves it at the next
`step()`. It is not limited to one call, so it also covers `engine.scale(loss).backward()` and several backwards per
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

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
