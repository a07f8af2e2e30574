"""Backwards that the user starts without the engine: `loss.backward()` instead of `engine.backward(loss)`.

`engine.scale` puts a hook on the loss it returns, so that the engine recognises the backward of that loss when it
begins. Every other backward that gives gradients to the model's parameters has an unscaled loss. Its gradients are
divided by the accumulation steps when they arrive. With a loss scale that is not possible: without the scale, backward
has already lost small gradients. Then such a backward is refused before it has changed anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .accumulation import Accumulation, SyncWindow
from .errors import EngineError


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
