"""Finds the tensors in the arguments and outputs of a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

__all__ = ["tensors_in"]

_CLOSED = (type, torch.nn.Module, ModuleType, FunctionType)
"""Types of objects whose attributes are not searched."""


def tensors_in(value: Any, *, objects: bool = False) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists, sets, mappings and dataclasses (model outputs are one of these), in order.

    One loop and no recursion, because it runs before and after every module.

    Args:
        value: what to search.
        objects: also search the attributes of all other objects, such as key-value caches. Tensors that only an
            iterator can produce are never found.
    """
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            left.extend(reversed(item))
        elif item is None or isinstance(item, (bool, int, float, str)):
            continue
        elif isinstance(item, Mapping):
            left.extend(reversed(list(item.values())))
        elif isinstance(item, (set, frozenset)):
            left.extend(reversed(list(item)))
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            left.extend(getattr(item, field.name, None) for field in reversed(dataclasses.fields(item)))
        elif objects and not isinstance(item, _CLOSED) and id(item) not in seen:
            seen.add(id(item))
            left.extend(reversed(list(getattr(item, "__dict__", {}).values())))
    return found
