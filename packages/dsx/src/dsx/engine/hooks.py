"""Hooks that are called while a step runs: before each forward, before each backward and before the update.

An engine calls its hooks in order. Observers (`observers.py`) are called after the step.
"""

from __future__ import annotations

from typing import Any

import torch


class StepHook:
    """Does nothing; subclasses override what they need."""

    needs_engine_backward = False
    """Whether it needs `engine.backward`, and cannot work with `loss.backward()`. Observers may have this attribute
    too.
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
