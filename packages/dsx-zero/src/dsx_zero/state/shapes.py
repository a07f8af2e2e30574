"""Optimizer states whose shape is not the parameter's, and which of their elements a rank has.

Three kinds have coordinates of their own. Scales of coded moments have one value per block of elements, from the
parameter's first on; layouts cut no block (`FlatLayout.build`), so that a rank has whole blocks. An optimizer names
them with their block (`state_parts`). Optimizers that get whole tensors (`needs_whole_tensors`) keep rows, columns or
matrices (Adafactor, Shampoo), and the owner of a tensor has the whole of them. States of a tensor's matrices (Dion's
basis, moments of low rank) are divided in proportion to the matrices' elements (`plan/matrices.py`).

Wherever states are saved, such a state is a tensor of its own shape, of which each rank has a range: in checkpoints,
whole in `full_state_dict`, and as a `ShardView` in torch's checkpoints.

Left out: scales of tensors of which tensor-parallel ranks have slices. Their blocks are those of a slice, and another
slicing has no such blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from ..errors import ZeroStateError
from ..params.flat import FlatGroup
from ..params.whole import join_ranges
from ..plan.layout import LocalSlice
from ..step.masters import Master, block_of, needs_whole_tensors
from ..step.matrix_rules import matrix_rule, stateful
from ..step.states import OptimizerStates

__all__ = [
    "Held",
    "ShapedKind",
    "ShapedState",
    "held_elements",
    "held_of_state",
    "joining_ranges",
    "range_of",
    "keeps_shaped",
    "shaped_state",
]


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
class ShapedKind:
    """The facts that all ranks know of a state with a shape of its own, also those that have nothing of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    joins_slices: bool = False


@dataclass(frozen=True)
class Held:
    """The part that a master has of a state with a shape of its own.

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
    """The part that a master has of a state; None for a state with one value per element, or one value. `value`: the
    state, or an example.

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
    """The part that belongs to the elements `part` of the master; None for a state with one value per element, or one
    value. A state of the whole tensor belongs to its first element.
    """
    held = held_of_state(states, master, key, value)
    if held is None:
        return None
    first, last = max(part.start, master.slice.start), min(part.stop, master.slice.stop)
    start = held.at(first)
    stop = max(start, held.at(last)) if part.numel else start
    values = value.detach().reshape(-1)[start - held.start : stop - held.start]
    return ShapedState(key, held.shape, start, values, held.joins_slices)


def held_elements(
    states: OptimizerStates, masters: Sequence[Master], key: str, kind: ShapedKind, device: torch.device
) -> ShapedState:
    """The elements that this rank's masters of a parameter have of a state, to be read; possibly none, on `device`."""
    start, parts = 0, list[torch.Tensor]()
    for master in masters:
        value: Any = states.of(master).get(key)
        held = None if value is None else held_of_state(states, master, key, value)
        if value is not None and held is not None and value.numel():
            start = start if parts else held.start
            parts.append(value.detach().reshape(-1))
    if not parts:
        return ShapedState(key, kind.shape, 0, torch.empty(0, dtype=kind.dtype, device=device), kind.joins_slices)
    return ShapedState(key, kind.shape, start, parts[0] if len(parts) == 1 else torch.cat(parts), kind.joins_slices)


def joining_ranges(
    group: FlatGroup, kind: ShapedKind, start: int, *, stage: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A plain function that makes the whole state of this rank's elements, 1-D, from `start` on (collective). The other
    elements are those of the ranks that have the rest of the parameter's shards, and of the other slices.
    """
    shards = (group.ranks.group,) if stage > 0 and group.ranks.size > 1 else ()
    groups = shards + (tuple(group.ranks.tensor_groups) if kind.joins_slices else ())
    return partial(join_ranges, kind.shape, start, groups=groups, device=group.key.device)


def range_of(name: str, key: str, value: Any, start: int, stop: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Elements of a whole state that was read from somewhere, 1-D. Raises ZeroStateError if it has another shape."""
    got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if got != shape and not (isinstance(value, torch.Tensor) and value.numel() == prod(shape) == 1):
        raise ZeroStateError(
            f"{name}: optimizer state {key!r}: got {got}, expected the shape {shape}, which is what the optimizer keeps"
            " with the settings that it has now"
        )
    return value.reshape(-1)[start:stop]


def keeps_shaped(optimizer: Any) -> bool:
    """May the optimizer keep states with shapes of their own?"""
    blocks = hasattr(optimizer, "state_parts")
    return blocks or needs_whole_tensors(optimizer) or stateful(matrix_rule(optimizer)) is not None
