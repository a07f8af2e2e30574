"""The parts of an engine that are called while a step runs: hooks, the clock, and the size of an update.

Hooks are called before each forward, before each backward and before the update, in order. Observers
(`observers.py`) are called after the step. A clock times ranges named forward, backward and step: `NoClock` measures
nothing; `dsx_monitor.WallClock` has the same methods and measures. On CUDA it records events and reads them after they
have happened, so that timing never waits for the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

_NOTHING = nullcontext()


class Clock(Protocol):
    """Times the parts of a step."""

    def range(self, name: str) -> AbstractContextManager[object]: ...

    def elapsed(self) -> list[tuple[str, float]]: ...


class NoClock:
    """Measures nothing."""

    def range(self, name: str) -> AbstractContextManager[object]:
        """A context that does nothing; the same one each time."""
        return _NOTHING

    def elapsed(self) -> list[tuple[str, float]]:
        """Returns no figures."""
        return []


class StepHook:
    """Does nothing; subclasses override what they need."""

    needs_engine_backward = False
    """Whether it needs `engine.backward`, and cannot work with `loss.backward()`. Observers may have this attribute
    too.
    """

    def before_batch(self) -> None:
        """A pipeline begins an update, on all ranks: the place for what is collective. Elsewhere it is not called."""

    def after_batch(self) -> None:
        """A pipeline has run the forwards and backwards of an update without a failure, on all ranks: a place for what
        is collective, before anything is changed. Elsewhere it is not called.
        """

    def micro_batch_read(self, item: Any) -> None:
        """A pipeline has read a micro-batch, (inputs, labels), to be looked at only. Elsewhere nothing is read."""

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before the module runs on a micro-batch, with its arguments, which must not be changed."""

    def before_backward(self, loss: torch.Tensor, boundary: bool) -> None:
        """Called before the backward of `loss` (unscaled); `boundary`: it is the last one of its update."""

    def before_update(self) -> None:
        """Called when all gradients of the update have arrived."""


class TokenCount(StepHook):
    """Counts the tokens of a language model's inputs: the elements of the first 2-D tensor of integers."""

    def __init__(self) -> None:
        self._tokens = 0

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the micro-batch's tokens; those of evaluations are not counted."""
        if not torch.is_grad_enabled():
            return
        found = kwargs.get("input_ids")
        for value in (found, *args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
                self._tokens += value.numel()
                return

    def take(self) -> int:
        """Tokens since the last call, of this rank."""
        tokens, self._tokens = self._tokens, 0
        return tokens


class Batches(Protocol):
    """The size of an update, and the weights and learning rates that depend on it."""

    @property
    def known_before(self) -> bool:
        """Whether gradient scale and learning rates of an update are known before its last backward."""
        ...

    def note(self, size: Any) -> None: ...

    def before_forward(self) -> None: ...

    def weight(self) -> float: ...

    def gradient_scale(self) -> float: ...

    def samples(self, configured: int) -> int: ...

    def rates(self) -> AbstractContextManager[object]: ...

    def forget(self) -> None: ...


class FixedBatches:
    """Every update has the configured number of samples."""

    known_before = True

    def note(self, size: Any) -> None:
        """Does nothing: the size is fixed."""

    def before_forward(self) -> None:
        """Does nothing: the size is fixed."""

    def weight(self) -> float:
        """Returns 1: all losses have the same weight."""
        return 1.0

    def gradient_scale(self) -> float:
        """Returns 1: the update uses the mean of the gradients as it is."""
        return 1.0

    def samples(self, configured: int) -> int:
        """Returns the configured number."""
        return configured

    def rates(self) -> AbstractContextManager[object]:
        """A context that changes no learning rate."""
        return nullcontext()

    def forget(self) -> None:
        """Does nothing: nothing is counted."""
