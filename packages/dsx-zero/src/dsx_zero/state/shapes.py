"""Optimizer states whose shape is not the parameter's, and which of their elements a rank has.

Three kinds have coordinates of their own. Scales of coded moments have one value per block of elements, from the
parameter's first on; layouts cut no block (`FlatLayout.build`), so that a rank has whole blocks. An optimizer names
them with their block (`state_parts`). Optimizers that get whole tensors (`needs_whole_tensors`) keep rows, columns or
matrices (Adafactor, Shampoo), and the owner of a tensor has the whole of them. States of a tensor's matrices (Dion's
basis, moments of low rank) are divided in proportion to the matrices' elements (`plan/matrices.py`).

In a checkpoint such a state is a tensor of its own shape, of which each rank writes a range. Left out: containers of
tensors, and whole states in one dictionary (`full_state_dict`, torch's checkpoints), which refuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..errors import ZeroStateError
from ..plan.layout import LocalSlice
from ..step.masters import Master, block_of, needs_whole_tensors
from ..step.states import OptimizerStates

__all__ = ["Held", "ShapedState", "held_of_state", "refuse_shaped", "shaped_state"]


@dataclass(frozen=True)
class ShapedState:
    """Elements of a state of this shape, from `start` on; `values` is 1-D. `joins_slices`: where tensor parallelism
    cuts the parameter, the state is still that of the whole tensor.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor
    joins_slices: bool = False


@dataclass(frozen=True)
class Held:
    """What a master has of a state with a shape of its own.

    Attributes:
        shape: of the whole state.
        start: the master's first element in it; form: the shape of what it has.
        at: the state's first element that goes with an element of the parameter, or with a later one.
        joins_slices: see `ShapedState`.
    """

    shape: tuple[int, ...]
    start: int
    form: tuple[int, ...]
    at: Callable[[int], int]
    joins_slices: bool = False


def held_of_state(states: OptimizerStates, master: Master, key: str, value: Any) -> Held | None:
    """What a master has of a state; None for a state with one value per element, or one value. `value`: the state, or
    an example.

    Raises:
        ZeroStateError: a block lies in two masters.
    """
    inner, part = states.inner, master.slice
    logical = master.group.layout.shapes[master.group.layout.index(master.name)]
    block = block_of(inner, key)
    if block is not None:
        if part.start % block:
            raise ZeroStateError(
                f"{master.name}: this rank's slice begins at element {part.start}, expected a multiple of"
                f" {block}, the block of the state {key!r} of {type(inner).__name__}"
            )
        form = (-(-master.numel // block),)
        return Held((-(-prod(logical) // block),), part.start // block, form, lambda element: -(-element // block))
    of_matrices = states.of_matrices(master).get(key)
    if of_matrices is not None:
        start, stop = of_matrices.at(part.start), of_matrices.at(part.stop)
        whole = stop - start == prod(of_matrices.shape) and master.shape == torch.Size(logical)
        form = of_matrices.shape if whole else (stop - start,)
        return Held(of_matrices.shape, start, form, of_matrices.at, of_matrices.of_slice)
    whole = master.numel == prod(logical) and needs_whole_tensors(inner)
    if not whole or not isinstance(value, torch.Tensor) or value.numel() == 1 or value.shape == master.shape:
        return None
    shape, size = tuple(value.shape), value.numel()
    return Held(shape, 0, shape, lambda element: size if element else 0)


def shaped_state(states: OptimizerStates, master: Master, key: str, value: Any, part: LocalSlice) -> ShapedState | None:
    """What belongs to the elements `part` of the master; None for a state with one value per element, or one value. A
    state of the whole tensor belongs to its first element.
    """
    held = held_of_state(states, master, key, value)
    if held is None:
        return None
    first, last = max(part.start, master.slice.start), min(part.stop, master.slice.stop)
    start = held.at(first)
    stop = max(start, held.at(last)) if part.numel else start
    values = value.detach().reshape(-1)[start - held.start : stop - held.start]
    return ShapedState(key, held.shape, start, values, held.joins_slices)


def refuse_shaped(name: str, states: Iterable[Any], call: str) -> None:
    """Raise ZeroStateError if there is a `ShapedState` among the states of a parameter."""
    for state in states:
        if isinstance(state, ShapedState):
            raise ZeroStateError(
                f"{call}: {name} has the optimizer state {state.key!r} of shape {state.shape}, expected one value per"
                " element or a single value; checkpoints (dsx.initialize's save_checkpoint, dsx_checkpoint.save) and"
                " this rank's state_dict() have such states"
            )
