"""Rows of DeepSpeed's optimizer states, and the places of the parameters in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointCorruptError, shown
from .source import Tensor
from .unpickling import Opaque

__all__ = [
    "Where", "cast", "check_used_up", "concatenated", "fragments_by_mapping", "fragments_by_order", "joined",
    "number_of_groups", "plain_item", "states_by_name", "states_of", "tensors_under",
]  # fmt: skip

Where = list[tuple[int, int, int]]
"""The parts of a parameter in order: rank, first element in the rank's row, number of elements."""


def fragments_by_mapping(mappings: list[Any]) -> dict[str, Where]:
    found: dict[str, Where] = {}
    for rank, mapping in enumerate(mappings):
        for name, address in mapping.items():
            found.setdefault(name, []).append((rank, *_address(address)))
    return found


def _address(address: Any) -> tuple[int, int]:
    """First element and number of elements of a fragment."""
    if isinstance(address, Opaque):
        numel, start = address.value("numel"), address.value("start")
        if numel is None and len(address.made_from[0]) == 2:
            numel, start = address.made_from[0]
    else:
        numel, start = address
    if type(numel) is not int or type(start) is not int or numel < 0 or start < 0:
        raise CheckpointCorruptError(f"param_slice_mappings: got {shown(numel)} elements from {shown(start)}")
    return start, numel


def fragments_by_order(shapes: Mapping[str, tuple[int, ...]], lengths: list[int]) -> dict[str, Where]:
    """Parameters in a row over all ranks' pieces of these lengths."""
    begins = [sum(lengths[:rank]) for rank in range(len(lengths))]
    found: dict[str, Where] = {}
    at = 0
    for name, shape in shapes.items():
        stop = at + math.prod(shape)
        found[name] = [
            (rank, max(at, begin) - begin, min(stop, begin + length) - max(at, begin))
            for rank, (begin, length) in enumerate(zip(begins, lengths))
            if max(at, begin) < min(stop, begin + length)
        ]
        at = stop
    return found


def number_of_groups(rows: list[list[torch.Tensor]]) -> int:
    """The number of flat groups. Raises `CheckpointCorruptError` unless it is the same on all ranks, and the groups are
    floating-point numbers of one dtype.
    """
    counts = sorted({len(row) for row in rows})
    if len(counts) > 1:
        raise CheckpointCorruptError(f"the ranks have other numbers of flat groups: {counts}")
    dtypes = {flat.dtype for row in rows for flat in row}
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise CheckpointCorruptError(
            f"flat groups of masters: got {', '.join(sorted(map(str, dtypes)))}, expected one floating-point dtype"
        )
    return counts[0]


def check_used_up(whose: str, used: int, there: int) -> None:
    """Raise `CheckpointCorruptError` unless the parameters fill the flat rows: else all of them may lie elsewhere."""
    if used != there:
        raise CheckpointCorruptError(
            f"param_shapes: the parameters of {whose} have {used} elements in the flat groups of masters, and there are"
            f" {there}; names or rows are missing, so no parameter's place is known"
        )


def joined(
    name: str, shape: tuple[int, ...], rows: list[torch.Tensor], where: Where, padding: int | None = 0
) -> Tensor:
    """A parameter from pieces of the ranks' rows.

    Args:
        padding: the pieces have fewer elements than this in addition to those of the parameter, or none if it is 0;
            None: any number.

    Raises:
        CheckpointCorruptError: the pieces have other numbers of elements.
    """
    numel = math.prod(shape)
    for rank, start, count in where:
        if start + count > rows[rank].numel() and (start >= rows[rank].numel() or rank != where[-1][0]):
            raise CheckpointCorruptError(
                f"{shown(name)}: rank {rank} has {rows[rank].numel()} elements, expected {start + count}"
            )
    there = sum(min(count, rows[rank].numel() - start) for rank, start, count in where)
    extra = sum(count for *_, count in where) - numel
    if there < numel:
        raise CheckpointCorruptError(f"{shown(name)}: the ranks hold fewer elements than shape {shape} has")
    if padding is not None and extra >= max(padding, 1):
        raise CheckpointCorruptError(f"{shown(name)}: the ranks hold {extra} elements more than shape {shape} has")

    def fetch() -> torch.Tensor:
        pieces = [rows[rank].reshape(-1)[start : start + count] for rank, start, count in where]
        return torch.cat(pieces)[:numel].reshape(shape)

    return Tensor(shape, rows[0].dtype, fetch)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return Tensor(tensor.shape, dtype, lambda: tensor.fetch().to(dtype))


def states_of(saved: Any) -> dict[int, dict[str, Any]]:
    """Group -> states of its row."""
    if isinstance(saved, dict) and isinstance(saved.get("state"), dict):
        return saved["state"]
    return dict(enumerate(saved)) if isinstance(saved, list) else {}


def concatenated(states: dict[int, dict[str, Any]], lengths: list[int]) -> dict[str, Any]:
    """States of sub-groups as those of one row."""
    if not states:
        return {}
    if len(states) != len(lengths):
        raise CheckpointCorruptError(f"there are optimizer states of {len(states)} of {len(lengths)} sub-groups")
    ordered = [states[number] for number in sorted(states)]
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for state in ordered for key in state):
        values = [state[key] for state in ordered if key in state]
        if len(values) < len(ordered):
            raise CheckpointCorruptError(f"the optimizer state {shown(key)} is missing in a sub-group")
        rows = [isinstance(v, torch.Tensor) and v.numel() == n and v.dim() > 0 for v, n in zip(values, lengths)]
        if not all(rows) and any(isinstance(v, torch.Tensor) and v.numel() > 1 for v in values):
            raise CheckpointCorruptError(f"the optimizer state {shown(key)} has other lengths than the sub-groups")
        found[key] = torch.cat([v.reshape(-1) for v in values]) if all(rows) else values[0]
    return found


_ERRORS_OF_COMPRESSION = ("worker_error", "server_error")
"""States of 1-bit optimizers, which belong to ranks and not to parameters."""


def states_by_name(states: list[dict[str, Any]], lengths: list[int]) -> dict[str, Any]:
    """State -> all ranks' rows of it, or the number it is."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for state in states for key in state):
        values = [state[key] for state in states if key in state]
        if len(values) < len(states):
            raise CheckpointCorruptError(f"the optimizer state {shown(key)} is missing on a rank")
        rows = [isinstance(v, torch.Tensor) and v.dim() > 0 and v.numel() >= n for v, n in zip(values, lengths)]
        if key in _ERRORS_OF_COMPRESSION:
            continue
        if all(rows):  # a row may be longer than that of the masters, which files have without padding
            found[key] = values
        elif isinstance(values[0], (int, float)) or (isinstance(values[0], torch.Tensor) and values[0].numel() == 1):
            found[key] = plain_item(values[0])
        elif any(isinstance(value, torch.Tensor) for value in values):
            raise CheckpointCorruptError(f"the optimizer state {shown(key)} has fewer elements than its masters")
    return found


def tensors_under(state: Any, key: str) -> list[torch.Tensor]:
    found = state.get(key)
    if not isinstance(found, (list, tuple)) or not all(isinstance(item, torch.Tensor) for item in found) or not found:
        raise CheckpointCorruptError(f"the optimizer states have no tensors under {key!r}")
    return list(found)


def plain_item(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
