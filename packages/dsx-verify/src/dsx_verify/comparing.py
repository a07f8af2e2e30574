"""Comparison of each kind of value of an audit, and its tolerance."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from .compare import Comparison, magnitude
from .expected import rounding
from .report import Difference

__all__ = ["Judge"]

UPDATE = 1e-3
"""A parameter may miss its change by this share of the largest change: the rounding of an optimizer in fp32."""


class Judge(Comparison):
    """Compares the values of one point of a step on one rank. Differences keep the order in which they were found."""

    def __init__(self, step: int, rank: int) -> None:
        super().__init__(rank)
        self._step = step

    def equal(self, kind: str, name: str, got: Any, expected: Any) -> None:
        """Two values that must be equal."""
        self.compared[kind] = self.compared.get(kind, 0) + 1
        if got != expected:
            self.say(kind, name, f"got {got}, expected {expected}")

    def names(
        self, own: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]
    ) -> None:
        """The system must have the parameters of the plain model."""
        for name, tensor in own.items():
            if name in aliases:
                other = own.get(aliases[name])
                if other is None or not torch.equal(other, tensor):
                    self.say("tied weights", name, f"holds values of its own, but is tied to {aliases[name]}")
            elif name not in shapes:
                self.say("names", name, "is not in the plain model")
            else:
                self.equal("shape", name, tuple(tensor.shape), shapes[name])
        missing = [name for name in shapes if name not in own and name not in aliases.values()]
        missing += [name for name in shapes if name not in own and name in aliases.values()]
        for name in missing:
            if not any(first == name and alias in own for alias, first in aliases.items()):
                self.say("names", name, "is missing in the system")

    def dtypes(self, own: Mapping[str, torch.Tensor], master: torch.dtype | None, trained: Collection[str]) -> None:
        """The optimizer must update parameters of the dtype that was asked for."""
        for name in trained:
            if master is not None and name in own:
                self.equal("dtype", f"the parameter {name} that the optimizer updates", own[name].dtype, master)

    def tensor(self, kind: str, name: str, got: torch.Tensor, expected: torch.Tensor, allowed: float) -> None:
        """Two tensors; `allowed` is absolute."""
        self.tensors(self._step, kind, name, got, expected, allowed)

    def losses(
        self,
        got: list[float],
        own: list[float],
        everyone: list[float],
        noise: float,
        parts: list[tuple[float, ...]] | None = None,
    ) -> None:
        """Losses of micro-batches, or the mean over this rank's or over all ranks' micro-batches.

        Args:
            parts: factors of each micro-batch by which its loss may have been scaled.
        """
        if not got:
            return
        if len(got) == len(own) and (len(own) > 1 or parts is not None):
            factors = [(1.0, *more) for more in parts] if parts else [(1.0,)] * len(own)
            pairs = [
                (f"micro-batch {micro}", a, [b * factor for factor in factors[micro]])
                for micro, (a, b) in enumerate(zip(got, own))
            ]
        else:
            pairs = [("the micro-batches", got[-1], [sum(own) / len(own), sum(everyone) / len(everyone)])]
        for name, value, answers in pairs:
            nearest = min(answers, key=lambda answer: abs(answer - value))
            self.numbers(self._step, "loss", name, value, nearest, 8 * noise * max(abs(nearest), 1e-3))

    def gradients(
        self,
        kind: str,
        got: Mapping[str, torch.Tensor],
        expected: Mapping[str, torch.Tensor],
        allowed: Mapping[str, float],
    ) -> None:
        """Whole gradients; one that is missing counts as zero. No gradients at all: nothing is compared."""
        if not got:
            return
        for name, value in expected.items():
            self.tensor(kind, name, got.get(name, torch.zeros_like(value)), value, allowed[name])

    def rates(self, got: list[float], expected: list[float]) -> None:
        """Learning rates by group. Systems may split groups, so sets are compared where the numbers differ."""
        if len(got) == len(expected):
            for group, (a, b) in enumerate(zip(got, expected)):
                self.numbers(self._step, "learning rate", f"group {group}", a, b, 1e-6 * abs(b))
            return
        for group, value in enumerate(got):
            nearest = min(expected, key=lambda rate: abs(rate - value))
            self.numbers(self._step, "learning rate", f"group {group}", value, nearest, 1e-6 * abs(nearest))

    def scaler(self, before: Mapping[str, float], after: Mapping[str, float], *, skipped: bool) -> None:
        """The loss scale after an update: smaller after one that was left out, larger after enough that were not."""
        if not before:
            return
        good = 0 if skipped else int(before["_growth_tracker"]) + 1
        grows = good == int(before["growth_interval"])
        factor = before["backoff_factor"] if skipped else before["growth_factor"] if grows else 1.0
        right = before["scale"] * factor
        self.numbers(self._step, "loss scale", "the scale", after["scale"], right, 1e-6 * right)
        counted = int(after["_growth_tracker"])
        self.equal("loss scale", "good updates since the scale changed", counted, 0 if grows else good)

    def parameter(
        self,
        name: str,
        before: torch.Tensor,
        after: torch.Tensor,
        expected: torch.Tensor,
        trained: Collection[str],
    ) -> None:
        """A parameter after an update."""
        if name not in trained:
            self.tensor("frozen parameter", name, after, before, 0.0)
            return
        change = magnitude(expected.double() - before.double())
        allowed = UPDATE * change + 4 * rounding(after.dtype) * magnitude(expected)
        self.tensor("parameter", name, after, expected, allowed)

    def buffer(self, name: str, got: torch.Tensor, expected: torch.Tensor, noise: float) -> None:
        """A buffer after an update. Its dtype is the plain model's."""
        self.tensor("buffer", name, got, expected, 1e-6 * magnitude(expected) + 64 * noise * magnitude(expected))

    def say(self, kind: str, name: str, words: str) -> None:
        """A difference in words."""
        self._add(Difference(self._step, kind, name, self._rank, 1.0, 0.0, 0.0, 0.0, said=words))
