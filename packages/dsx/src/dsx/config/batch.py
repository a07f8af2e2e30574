"""The arithmetic of the three batch sizes: B = m * g * W.

B is ``train_batch_size`` (samples per optimizer step over all ranks), m is ``train_micro_batch_size_per_gpu`` (samples
per rank and forward pass), g is ``gradient_accumulation_steps``, W is the number of data-parallel ranks. Two of the
three give the third. B or m alone sets g = 1. g alone is refused, because it gives no batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import Problem

__all__ = ["ACCUMULATION", "MICRO", "TRAIN", "BatchSizes", "resolve_batch"]

_CODE = "DSX105"
"""The page of all problems of this module: docs/reference/errors.md."""

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSizes:
    """The three batch sizes of one run; ``train == micro * accumulation * world_size`` always holds.

    Attributes:
        train: samples per optimizer step over all data-parallel ranks.
        micro: samples per rank in one forward and backward pass.
        accumulation: forward and backward passes per optimizer step.
        world_size: number of data-parallel ranks.
        derived: names of the keys that were computed, not given.
    """

    train: int
    micro: int
    accumulation: int
    world_size: int
    derived: tuple[str, ...] = ()


def resolve_batch(
    given: Mapping[str, int | None], world_size: int, auto: frozenset[str] = frozenset()
) -> BatchSizes | Problem:
    """Complete and check the batch sizes.

    Args:
        given: values of the three keys; None or absent means "compute it". Values are positive.
        world_size: number of data-parallel ranks, positive.
        auto: which of the keys the document sets to "auto"; only the text of a problem depends on it.

    Returns:
        The completed sizes, or the problem with them.
    """
    train, micro, steps = given.get(TRAIN), given.get(MICRO), given.get(ACCUMULATION)
    shown = _shown(given, world_size)
    if train is None and micro is None:
        return _no_size(steps, shown, auto)
    if train is None:
        steps = steps or 1
        train = (micro or 0) * steps * world_size
    elif micro is None:
        steps = steps or 1
        if train % (steps * world_size):
            return _indivisible(train, f"{ACCUMULATION} {steps} * {world_size} ranks", steps * world_size, shown)
        micro = train // (steps * world_size)
    elif steps is None:
        if train % (micro * world_size):
            return _indivisible(train, f"{MICRO} {micro} * {world_size} ranks", micro * world_size, shown)
        steps = train // (micro * world_size)
    micro, steps = micro or 0, steps or 0
    if train != micro * steps * world_size:
        product = micro * steps * world_size
        return Problem(
            "conflict",
            TRAIN,
            "the three batch sizes contradict each other",
            got=shown,
            expected=f"{TRAIN} = {MICRO} * {ACCUMULATION} * ranks = {micro} * {steps} * {world_size} = {product}",
            fix=f"set {TRAIN} to {product}, or leave one of the three out and it is computed",
            code=_CODE,
        )
    derived = tuple(key for key in (TRAIN, MICRO, ACCUMULATION) if given.get(key) is None)
    return BatchSizes(train, micro, steps, world_size, derived)


def _no_size(steps: int | None, shown: str, auto: frozenset[str]) -> Problem:
    left_open = [key for key in (TRAIN, MICRO) if key in auto]
    if left_open:
        return Problem(
            "missing", left_open[0], 'a batch size cannot be computed from "auto" alone', got=shown,
            expected=f"a number for {TRAIN} or {MICRO}; then the other may be \"auto\"",
            fix=f'set "{left_open[0]}" to a number; programs such as the Hugging Face Trainer do this before training',
            code=_CODE,
        )  # fmt: skip
    what = f"only {ACCUMULATION} is set" if steps is not None else "no batch size is set"
    fix = f'add "{MICRO}": 1'
    return Problem("missing", TRAIN, what, got=shown, expected=f"{TRAIN} or {MICRO}", fix=fix, code=_CODE)


def _indivisible(train: int, text: str, divisor: int, shown: str) -> Problem:
    lower = train // divisor * divisor
    choices = f"{lower} or {lower + divisor}" if lower else str(divisor)
    return Problem(
        "conflict",
        TRAIN,
        "the batch cannot be split evenly",
        got=shown,
        expected=f"a multiple of {text} = {divisor}",
        fix=f"set {TRAIN} to {choices}",
        code=_CODE,
    )


def _shown(given: Mapping[str, int | None], world_size: int) -> str:
    parts = [f"{key} {given[key]}" for key in (TRAIN, MICRO, ACCUMULATION) if given.get(key) is not None]
    return ", ".join([*parts, f"{world_size} {'rank' if world_size == 1 else 'ranks'}"])
