"""Conditions under which the optimizers that average in one bit work: the one place that decides it.

A configuration names an optimizer and is judged before anything is built; an engine is given an optimizer object. Both
ask here, so that they refuse the same things for the same reasons:

    ZeRO stages above 0   refused: whole momenta are averaged, and a rank would hold slices
    sums of gradients     refused: momenta are averaged, and a mean cannot be undone afterwards
    gradient clipping     works; what is clipped by which norm changes when compression begins (`clipping_note`)

The conditions that concern the arguments of the optimizers themselves are in `checks`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from dsx_core import Finding

from .adam import OneBitAdam
from .base import CompressedOptimizer
from .lamb import OneBitLamb
from .zero_one import ZeroOneAdam

OPTIMIZERS: dict[str, type[CompressedOptimizer]] = {
    "OneBitAdam": OneBitAdam,
    "ZeroOneAdam": ZeroOneAdam,
    "OneBitLamb": OneBitLamb,
}
"""Class by the name that a configuration's `optimizer.type` has for it."""

# arguments that a configuration has no business with: an engine gives them, or has a key of its own for them
_NOT_CONFIGURED = frozenset({"self", "params", "deepspeed", "max_grad_norm", "process_group", "gradient_dtype"})


def find_optimizer(name: object) -> type[CompressedOptimizer] | None:
    """The class that `optimizer.type` names, in any case; None for every other optimizer."""
    if not isinstance(name, str):
        return None
    return {known.lower(): cls for known, cls in OPTIMIZERS.items()}.get(name.lower())


def config_arguments(cls: type[CompressedOptimizer]) -> tuple[str, ...]:
    """The names that `optimizer.params` may have for a class of `OPTIMIZERS`, in the order of its constructor."""
    return tuple(name for name in inspect.signature(cls.__init__).parameters if name not in _NOT_CONFIGURED)


def conflicts(name: str, *, zero_stage: int, gradient_allreduce_op: str) -> Iterator[Finding]:
    """Yield the settings that do not work with an optimizer.

    Args:
        name: the optimizer's, for the sentences.
        zero_stage: 0 to 3.
        gradient_allreduce_op: "mean" or "sum".
    """
    if zero_stage:
        yield Finding(
            "zero_optimization.stage",
            f"{name} does not work with ZeRO: it averages whole momenta over the ranks in one bit, and a "
            "rank would hold slices",
            str(zero_stage),
            "0",
            'set "stage" to 0, or use Adam or Lamb',
            kind="conflict",
        )
    if gradient_allreduce_op != "mean":
        yield Finding(
            "gradient_allreduce_op",
            f"{name} averages momenta",
            f'"{gradient_allreduce_op}"',
            '"mean"',
            "remove it, or scale the loss",
            kind="conflict",
        )


def clipping_note(name: str, max_norm: float) -> str:
    """One line that says what clipping gradients to `max_norm` means with an optimizer that averages by itself."""
    return (
        f"gradients clipped to the norm {max_norm:g} with {name}: exact steps are clipped by the norm of the mean "
        "gradient; in all other steps no rank "
        "knows that norm, and each rank clips its own gradient by its own norm"
    )
