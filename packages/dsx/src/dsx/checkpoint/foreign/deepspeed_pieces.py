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
    "Where", "cast", "concatenated", "fragments_by_mapping", "fragments_by_order", "joined", "plain_item",
    "states_by_name", "states_of", "tensors_under",
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


def joined(name: str, shape: tuple[int, ...], rows: list[torch.Tensor], where: Where) -> Tensor:
    """A parameter from pieces of the ranks' rows; additional elements at the end are padding."""
    numel = math.prod(shape)
    for rank, start, count in where:
        if start + count > rows[rank].numel() and (start >= rows[rank].numel() or rank != where[-1][0]):
            raise CheckpointCorruptError(
                f"{shown(name)}: rank {rank} has {rows[rank].numel()} elements, expected {start + count}"
            )
    if sum(count for *_, count in where) < numel:
        raise CheckpointCorruptError(f"{shown(name)}: the ranks hold fewer elements than shape {shape} has")

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
    if len(states) <= 1:
        return next(iter(states.values()), {})
    keys = next(iter(states.values()))
    ordered = [states[number] for number in sorted(states)]
    found: dict[str, Any] = {}
    for key in keys:
        values = [state[key] for state in ordered]
        rows = all(isinstance(v, torch.Tensor) and v.numel() == n and v.dim() for v, n in zip(values, lengths))
        found[key] = torch.cat([v.reshape(-1) for v in values]) if rows else values[0]
    return found


def states_by_name(states: list[dict[str, Any]], lengths: list[int]) -> dict[str, Any]:
    """State -> all ranks' rows of it, or the number it is."""
    found: dict[str, Any] = {}
    for key in states[0]:
        values = [state[key] for state in states if key in state]
        if len(values) < len(states):
            raise CheckpointCorruptError(f"the optimizer state {shown(key)} is missing on a rank")
        rows = [isinstance(v, torch.Tensor) and v.dim() > 0 and v.numel() >= min(n, 2) for v, n in zip(values, lengths)]
        if all(rows):
            found[key] = values
        elif isinstance(values[0], (int, float)) or (isinstance(values[0], torch.Tensor) and values[0].numel() == 1):
            found[key] = plain_item(values[0])
    return found


def tensors_under(state: Any, key: str) -> list[torch.Tensor]:
    found = state.get(key)
    if not isinstance(found, (list, tuple)) or not all(isinstance(item, torch.Tensor) for item in found) or not found:
        raise CheckpointCorruptError(f"the optimizer states have no tensors under {key!r}")
    return list(found)


def plain_item(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
