"""`Owners`: which optimizer a parameter object belongs to, for all models of the process."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

__all__ = ["Owners"]

T = TypeVar("T")


class Owners(Generic[T]):
    """The optimizer that each parameter object belongs to, and the parameter's name. It keeps neither of them alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[T], str]] = {}

    def add(self, parameter: torch.Tensor, optimizer: T, name: str) -> None:
        """Note that a parameter belongs to an optimizer from now on."""
        key = id(parameter)
        gone = weakref.ref(parameter, lambda _: self._known.pop(key, None))
        self._known[key] = (gone, weakref.ref(optimizer), name)

    def find(self, parameter: torch.Tensor) -> tuple[T, str] | None:
        """The optimizer of a parameter, if it is still there, and the parameter's name; None for other tensors."""
        entry = self._known.get(id(parameter))
        if entry is None or entry[0]() is not parameter:
            return None
        owner = entry[1]()
        return None if owner is None else (owner, entry[2])
