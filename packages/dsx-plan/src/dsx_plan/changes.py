"""Changes that make a plan fit that does not: each is planned, and they are sorted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .configs import with_values
from .errors import explains_itself
from .plans import Change, Plan

__all__ = ["changes_that_fit"]


def _candidates(answer: Plan) -> list[tuple[str, dict[str, Any], bool]]:
    """Changes to try, each as words, keys and recomputation: the cheap ones first."""
    config, layout = answer.config, answer.layout
    zero = config.get("zero_optimization") or {}
    stage, micro, accumulation = layout["stage"], layout["micro_batch"], layout["accumulation"]
    found: list[tuple[str, dict[str, Any], bool]] = []
    again = bool(layout["recompute"])
    smaller: dict[str, Any] = {}
    if micro > 1 and micro % 2 == 0:
        smaller = {
            "train_batch_size": None,
            "train_micro_batch_size_per_gpu": micro // 2,
            "gradient_accumulation_steps": accumulation * 2,
        }
        found.append((f"micro-batches of {micro // 2} and twice the accumulation", smaller, again))
    if not again:
        found.append(("recompute the blocks in backward (gradient_checkpointing_enable)", {}, True))
    stages = {f"zero_optimization.stage={s}": s for s in range(stage + 1, 4) if answer.world_size > 1 or s == 3}
    found += [(text, {"zero_optimization.stage": s}, again) for text, s in stages.items()]
    host = {"device": "cpu"}
    top = {"zero_optimization.stage": max(1, stage)}
    if not zero.get("offload_optimizer"):
        found.append(("optimizer states in host memory", {**top, "zero_optimization.offload_optimizer": host}, again))
    everything = {"zero_optimization.stage": 3}
    if not zero.get("offload_param"):
        both = {
            **everything,
            "zero_optimization.offload_optimizer": zero.get("offload_optimizer") or host,
            "zero_optimization.offload_param": host,
        }
        found.append(("parameters and optimizer states in host memory, stage 3", both, again))
    if stage < 3 and not again:
        found.append(("stage 3 and recomputation", everything, True))
    least = {**everything, **({"train_batch_size": None, "train_micro_batch_size_per_gpu": 1,
                              "gradient_accumulation_steps": accumulation * micro} if micro > 1 else {})}  # fmt: skip
    if micro > 1 or stage < 3:
        found.append(("stage 3, recomputation, micro-batches of 1", least, True))
    found.append(
        (
            "stage 3, recomputation, micro-batches of 1, parameters and optimizer states in host memory",
            {**least, "zero_optimization.offload_optimizer": host, "zero_optimization.offload_param": host},
            True,
        )
    )
    return found


def changes_that_fit(answer: Plan, planned: Callable[[Mapping[str, Any], bool], Plan]) -> list[Change]:
    """The changes that make a plan fit, fastest first.

    Args:
        answer: the plan that does not fit.
        planned: (configuration, recomputation) -> its plan.
    """
    found: list[Change] = []
    for what, values, again in _candidates(answer):
        try:
            other = planned(with_values(answer.config, values), again)
        except Exception as error:
            if explains_itself(error):
                continue  # not every model recomputes, not every configuration has every stage
            raise
        if other.fits:
            config = {**values, **({"recompute": True} if again and not answer.layout["recompute"] else {})}
            seconds = other.step_seconds * answer.tokens / max(1, other.tokens)
            found.append(Change(what, config, other.peak_bytes, seconds))
    return sorted(found, key=lambda change: change.step_seconds)
