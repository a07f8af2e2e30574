"""What may look into a step while it runs: before each forward, each backward and the update.

An engine calls its hooks in order; without any it calls nothing. Observers (`observers.py`) come after the step.
"""

from __future__ import annotations

from typing import Any

import torch


class StepHook:
    """Does nothing; subclasses override what they need."""

    needs_engine_backward = False
    """Whether it cannot work with backwards of losses that the engine did not scale (`loss.backward()`); observers
    may have it too.
    """

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is about to run on a micro-batch; these are its arguments, to be looked at only."""

    def before_backward(self, loss: torch.Tensor, boundary: bool) -> None:
        """`loss`, unscaled, is about to be differentiated; `boundary`: it is the last of its update."""

    def before_update(self) -> None:
        """All gradients of the update have arrived."""


class TokenCount(StepHook):
    """Counts the tokens of a language model's inputs: elements of the first whole-number tensor of two dimensions."""

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
