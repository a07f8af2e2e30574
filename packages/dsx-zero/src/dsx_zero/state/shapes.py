"""Optimizer states whose shape is not the parameter's, and which of their elements a rank has.

Two kinds have coordinates of their own. Scales of coded moments have one value per block of elements, from the
parameter's first on; layouts cut no block (`FlatLayout.build`), so that a rank has whole blocks. An optimizer names
them with their block (`state_parts`). Optimizers that get whole tensors (`needs_whole_tensors`) keep rows, columns or
matrices (Adafactor, Shampoo), and the owner of a tensor has the whole of them.

In a checkpoint such a state is a tensor of its own shape, of which each rank writes a range. Left out: containers of
tensors, and whole states in one dictionary (`full_state_dict`, torch's checkpoints), which refuse them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..errors import ZeroStateError
from ..plan.layout import LocalSlice
from ..step.masters import Master, block_of, needs_whole_tensors

__all__ = ["ShapedState", "refuse_shaped", "shape_of_state", "shaped_state"]


@dataclass(frozen=True)
class ShapedState:
    """Elements of a state of this shape, from `start` on; `values` is 1-D."""

    key: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor


def shape_of_state(inner: Any, master: Master, key: str, value: Any) -> tuple[tuple[int, ...], int] | None:
    """The whole state's shape, and the number of the master's first element in it; None for a state with one value per
    element, or one value. `value`: the state, or an example.

    Raises:
        ZeroStateError: a block lies in two masters.
    """
    logical = master.group.layout.shapes[master.group.layout.index(master.name)]
    block = block_of(inner, key)
    if block is not None:
        if master.slice.start % block:
            raise ZeroStateError(
                f"{master.name}: this rank's slice begins at element {master.slice.start}, expected a multiple of"
                f" {block}, the block of the state {key!r} of {type(inner).__name__}"
            )
        return (-(-prod(logical) // block),), master.slice.start // block
    whole = master.numel == prod(logical) and needs_whole_tensors(inner)
    if not whole or not isinstance(value, torch.Tensor) or value.numel() == 1 or value.shape == master.shape:
        return None
    return tuple(value.shape), 0


def shaped_state(inner: Any, master: Master, key: str, value: Any, part: LocalSlice) -> ShapedState | None:
    """What belongs to the elements `part` of the master; None for a state with one value per element, or one value. A
    state of the whole tensor belongs to its first element.
    """
    found = shape_of_state(inner, master, key, value)
    if found is None:
        return None
    shape, start = found
    block, flat = block_of(inner, key), value.detach().reshape(-1)
    if block is None:
        return ShapedState(key, shape, 0, flat if part.start == 0 and part.numel else flat[:0])
    first, last = max(part.start, master.slice.start), min(part.stop, master.slice.stop)
    first = -(-first // block)
    return ShapedState(key, shape, first, flat[first - start : max(first, -(-last // block)) - start])


def refuse_shaped(name: str, states: Iterable[Any], call: str) -> None:
    """Raise ZeroStateError if there is a `ShapedState` among the states of a parameter."""
    for state in states:
        if isinstance(state, ShapedState):
            raise ZeroStateError(
                f"{call}: {name} has the optimizer state {state.key!r} of shape {state.shape}, expected one value per"
                " element or a single value; checkpoints (dsx.initialize's save_checkpoint, dsx_checkpoint.save) and"
                " this rank's state_dict() have such states"
            )
