"""Chooses which blocks to recompute: a budget of bytes is kept, at the least time. Plain arithmetic.

A forward pass is a row of blocks. What a block keeps is alive from its forward to the end of its backward; the backward
goes through the blocks in reverse. A recomputed block keeps only its inputs after the forward, and everything while its
own backward runs. Let P(j) be the bytes that are kept up to block j. Then the conditions are

    P(n) + bytes outside of blocks behind it <= budget
    P(j - 1) + inputs(j) + kept(j) <= budget      for every block j that is recomputed

and the time to minimise is the sum of the forward times of the recomputed blocks. If it was measured, a block has a
third choice between these two: it keeps its inputs and the results of expensive operators (`Selective`).

The search extends choices block by block (dynamic programming). Of two choices with the same time it drops the one with
more bytes; few choices are left, because most blocks of a model are equal. With many different sizes, bytes are rounded
up to a grid. Then the budget is still kept, and the choice may be slightly slower than the best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BlockCost", "Choice", "Selective", "choose", "peak_bytes"]

MOST_CHOICES = 4096
"""If more choices than this are left, bytes are rounded up to a grid of this many steps."""


@dataclass(frozen=True)
class Selective:
    """The cost of a block that is recomputed except for its expensive operators, whose results are kept.

    Attributes:
        kept: bytes of these results, which are kept in addition to the inputs.
        alive: bytes of these results and of everything else that is saved for the backward, after the recomputation.
        seconds: the time of the recomputation, plus the time that keeping the results adds to the forward.
    """

    kept: int
    alive: int
    seconds: float


@dataclass(frozen=True)
class BlockCost:
    """The cost of one block in one forward pass.

    Attributes:
        name: the name of the module.
        kept: bytes that are saved for its backward if it is not recomputed.
        inputs: bytes of its inputs, which are kept if it is recomputed.
        seconds: the time of its forward.
        outside: bytes that are saved between the block before it and this one.
        selective: the cost of keeping the results of expensive operators too; None where that is not possible.
    """

    name: str
    kept: int
    inputs: int
    seconds: float
    outside: int = 0
    selective: Selective | None = None


@dataclass(frozen=True)
class Choice:
    """A decision. `fits`: is the peak within the budget? `selected`: those `recomputed` blocks that keep the results of
    expensive operators.
    """

    budget: int
    recomputed: tuple[str, ...]
    peak: int
    seconds: float
    peak_of_all_kept: int
    peak_of_all_recomputed: int
    selected: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.peak <= self.budget

    def __str__(self) -> str:
        names = ", ".join(self.recomputed) or "none"
        return (
            f"activation budget {self.budget} bytes: recomputed blocks: {names}; of these keep matrix products and"
            f" attention: {', '.join(self.selected) or 'none'}; peak {self.peak} bytes"
            f" (all kept {self.peak_of_all_kept}, all recomputed {self.peak_of_all_recomputed}), recomputation"
            f" {self.seconds * 1e3:.1f} ms per forward pass"
        )


def peak_bytes(
    costs: Sequence[BlockCost], recomputed: Sequence[str], *, outside: int = 0, selected: Sequence[str] = ()
) -> int:
    """The most bytes of activations that are alive at the same time.

    Args:
        recomputed: names of the blocks that are recomputed.
        outside: bytes that are saved behind the last block.
        selected: those of the recomputed ones that keep the results of expensive operators.
    """
    chosen, keeping, sum_so_far, peak = frozenset(recomputed), frozenset(selected), 0, 0
    for cost in costs:
        how = "all" if cost.name not in chosen else "operators" if cost.name in keeping else "inputs"
        option = _options(cost)[how]
        sum_so_far += cost.outside
        peak = max(peak, sum_so_far + option.alive)
        sum_so_far += option.kept
    return max(peak, sum_so_far + outside)


def choose(costs: Sequence[BlockCost], budget: int, *, outside: int = 0) -> Choice:
    """The choice with the least time whose peak is within the budget; if there is none, all blocks are recomputed.

    Args:
        costs: in the order of the forward pass.
        budget: bytes.
        outside: bytes that are saved behind the last block.
    """
    names = tuple(cost.name for cost in costs)
    found = _least_time(costs, budget - outside, budget) or ("inputs",) * len(costs)
    recomputed = tuple(name for name, how in zip(names, found) if how != "all")
    selected = tuple(name for name, how in zip(names, found) if how == "operators")
    return Choice(
        budget=budget,
        recomputed=recomputed,
        peak=peak_bytes(costs, recomputed, outside=outside, selected=selected),
        seconds=sum(_options(cost)[how].seconds for cost, how in zip(costs, found)),
        peak_of_all_kept=peak_bytes(costs, (), outside=outside),
        peak_of_all_recomputed=peak_bytes(costs, names, outside=outside),
        selected=selected,
    )


@dataclass(frozen=True)
class _Option:
    """Bytes of a block that are kept until its backward, bytes alive during it, and the seconds that it costs."""

    kept: int
    alive: int
    seconds: float


def _options(cost: BlockCost) -> dict[str, _Option]:
    """The choices of what a block keeps: everything, its inputs, or these and the results of expensive operators."""
    found = {
        "all": _Option(cost.kept, cost.kept, 0.0),
        "inputs": _Option(cost.inputs, cost.inputs + cost.kept, cost.seconds),
    }
    if (some := cost.selective) is not None:
        found["operators"] = _Option(cost.inputs + some.kept, cost.inputs + some.alive, some.seconds)
    return found


def _least_time(costs: Sequence[BlockCost], at_end: int, at_once: int) -> tuple[str, ...] | None:
    """The option chosen for each block; None if no choice fits.

    Args:
        at_end: the most bytes that all blocks together may keep.
        at_once: the most bytes that may be alive during the backward of a recomputed block.
    """
    # bytes kept so far -> (seconds, decisions as a linked list, the latest first)
    front: dict[int, tuple[float, tuple]] = {0: (0.0, ())}
    for cost in costs:
        following: dict[int, tuple[float, tuple]] = {}
        options = _options(cost)
        for kept, (seconds, decisions) in front.items():
            kept += cost.outside
            for how, option in options.items():
                if kept + option.kept <= at_end and kept + option.alive <= at_once:
                    _offer(following, kept + option.kept, seconds + option.seconds, (how, decisions))
        front = _not_dominated(following)
        if len(front) > MOST_CHOICES:
            front = _on_grid(front, max(1, at_end // MOST_CHOICES))
    if not front:
        return None
    _, decisions = min(front.values(), key=lambda found: found[0])
    found: list[str] = []
    while decisions:
        how, decisions = decisions
        found.append(how)
    return tuple(reversed(found))


def _offer(front: dict[int, tuple[float, tuple]], kept: int, seconds: float, decisions: tuple) -> None:
    if kept not in front or seconds < front[kept][0]:
        front[kept] = (seconds, decisions)


def _not_dominated(front: dict[int, tuple[float, tuple]]) -> dict[int, tuple[float, tuple]]:
    """Without choices that need more bytes than another and no less time."""
    best, left = float("inf"), {}
    for kept in sorted(front):
        if front[kept][0] < best:
            best = front[kept][0]
            left[kept] = front[kept]
    return left


def _on_grid(front: dict[int, tuple[float, tuple]], step: int) -> dict[int, tuple[float, tuple]]:
    rounded: dict[int, tuple[float, tuple]] = {}
    for kept, (seconds, decisions) in front.items():
        _offer(rounded, -(-kept // step) * step, seconds, decisions)
    return _not_dominated(rounded)
