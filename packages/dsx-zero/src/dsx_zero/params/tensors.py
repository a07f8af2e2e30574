"""Finding the tensors in what a module takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

__all__ = ["tensors_in"]

_CLOSED = (type, torch.nn.Module, ModuleType, FunctionType)
"""Objects whose attributes are not values that a module returns."""


def tensors_in(value: Any, *, objects: bool = False) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, sets, mappings and dataclasses (model outputs are one of these), in order.

    Args:
        value: what to search.
        objects: also search the attributes of any other object (key-value caches). What only an iterator holds is never
            found.
    """
    return _search(value, objects, set())


def _search(value: Any, objects: bool, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _search(item, objects, seen)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from _search(item, objects, seen)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _search(getattr(value, field.name, None), objects, seen)
    elif objects and not isinstance(value, _CLOSED) and id(value) not in seen:
        seen.add(id(value))
        for item in list(getattr(value, "__dict__", {}).values()):
            yield from _search(item, objects, seen)
