"""The planner's word on every candidate, asked in the first experiment, where the model and a batch are at hand.

Candidates come as configurations with a name; answers are bytes and seconds, or a text that says why there are none.
A group of candidates that differ in batch sizes only is asked about by ascending micro-batch until one does not fit;
the larger ones count as no smaller. Planning may take a second for each, so it ends after `SECONDS`: what was not asked
about is judged by the formula.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["Probe"]

SECONDS = 120.0
FAILURES = 3
"""Failures in a row after which the planner is not asked any more: it cannot trace this model."""


class Probe:
    """Asks the planner.

    Args:
        model: on the meta device.
        batch: arguments of one micro-batch, by place or by name, tensors on the meta device.
        micro: its size: the dimensions of this length at the front of tensors are those of the batch.
        ranks: that the plans are for: those that get samples of their own, or, where the configuration cuts the model,
            all.
        memory_bytes: what a rank may use.
        plan: `dsx_plan.plan`.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        micro: int,
        ranks: int,
        memory_bytes: int,
        plan: Callable[..., Any],
    ) -> None:
        self._model, self._batch, self._micro, self._plan = model, batch, micro, plan
        self._ranks, self._memory = ranks, memory_bytes

    @staticmethod
    def refused(reason: str) -> dict[str, Any]:
        """The answer where nothing can be asked."""
        return {"plans": {}, "reason": reason}

    def answer(self, candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Ask about candidates, in their order.

        Args:
            candidates: each with "key", "config", "micro" and "group".

        Returns:
            "plans": key -> [peak bytes, step seconds]; "reason": why some have no plan, or an empty text.
        """
        ends = time.monotonic() + SECONDS
        plans: dict[str, list[float]] = {}
        too_big: dict[str, list[float]] = {}
        reason, failed = "", 0
        for one in candidates:
            if time.monotonic() > ends:
                reason = f"planning was ended after {SECONDS:.0f} s; {len(plans)} of {len(candidates)} were planned"
                break
            if one["group"] in too_big:
                plans[one["key"]] = too_big[one["group"]]
                continue
            try:
                plan = plans[one["key"]] = self._planned(one)
                failed = 0
                if plan[0] > self._memory:
                    too_big[one["group"]] = plan
            except Exception as error:  # noqa: BLE001 - whatever a model raises under tracing; the search goes on
                reason, failed = f"{type(error).__name__}: {error}".splitlines()[0][:300], failed + 1
                if failed == FAILURES:
                    break
        return {"plans": plans, "reason": reason}

    def _planned(self, one: Mapping[str, Any]) -> list[float]:
        batch = self._resized(one["micro"])
        found = self._plan(self._model, dict(one["config"]), world_size=self._ranks, batch=batch, changes=False)
        return [int(found.peak_bytes), float(found.step_seconds)]

    def _resized(self, micro: int) -> Any:
        def other(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != self._micro:
                return tensor
            return torch.empty((micro, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

        return pytree.tree_map_only(torch.Tensor, other, self._batch)
