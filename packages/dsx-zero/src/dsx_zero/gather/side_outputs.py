"""Tensors through which backward can enter a module although its forward did not return them as tensors.

* *Side outputs*: tensors that a forward stored on its modules (auxiliary losses as attributes).
* *Iterators*: outputs that are a generator, `map`, `zip` or `iter(...)`. A search would consume them, so they
  are replaced by iterators that check each item when it is taken.

Each module is searched once per forward: by the innermost hooked module around it, which passes on what it finds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Generator, Iterator, MutableMapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["attribute_tensors", "watch_iterators"]

_PLAIN = frozenset({bool, int, float, str, type(None), dict, set})
"""Types of nearly all attributes of modules, which are not searched. The lookup is faster than `isinstance`."""

_CLOSED = (torch.Tensor, nn.Module, type, ModuleType, FunctionType, str, bytes, int, float, type(None))
"""Types of objects in which no iterator is searched."""


def attribute_tensors(module: nn.Module, stop: Container[nn.Module]) -> list[torch.Tensor]:
    """Tensors with a graph among the attributes of a module and of those below it, down to the modules in `stop`.

    Attributes may be tensors, or lists and tuples of them.
    """
    found: list[torch.Tensor] = []
    left = [module]
    while left:
        attributes = left.pop().__dict__
        for child in attributes["_modules"].values():
            if child is not None and child not in stop:
                left.append(child)
        for value in attributes.values():
            if type(value) not in _PLAIN and isinstance(value, (torch.Tensor, list, tuple)):
                for item in (value,) if isinstance(value, torch.Tensor) else value:
                    if isinstance(item, torch.Tensor) and item.grad_fn is not None:
                        found.append(item)
    return found


def watch_iterators(value: Any, watch: Callable[[Any], None]) -> Any:
    """Replace every iterator in `value` by one that calls `watch(item)` before it returns an item.

    Tuples, lists, mappings, dataclasses and attributes of other objects are searched, as by `tensors_in`. An object
    that can be changed in place stays the same object; a tuple that contains an iterator is made again.
    """
    return _Replacer(watch).visit(value)


class _Replacer:
    def __init__(self, watch: Callable[[Any], None]) -> None:
        self._watch = watch
        self._seen: set[int] = set()

    def visit(self, value: Any) -> Any:
        if isinstance(value, _CLOSED):
            return value
        if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
            kind = _WatchedGenerator if isinstance(value, Generator) else _WatchedIterator
            return kind(value, self._watch)
        if isinstance(value, tuple):
            items = [self.visit(item) for item in value]
            if all(new is old for new, old in zip(items, value)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if id(value) in self._seen:
            return value
        self._seen.add(id(value))
        if isinstance(value, list):
            self._visit_items(value, enumerate(value))
        elif isinstance(value, MutableMapping):
            self._visit_items(value, list(value.items()))
        else:
            self._visit_attributes(value)
        return value

    def _visit_items(self, container: Any, items: Any) -> None:
        for key, item in items:
            if (new := self.visit(item)) is not item:
                container[key] = new

    def _visit_attributes(self, value: Any) -> None:
        names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        for name in {*names, *getattr(value, "__dict__", ())}:
            item = getattr(value, name, None)
            if (new := self.visit(item)) is not item:
                object.__setattr__(value, name, new)  # works for dataclasses with frozen=True, too


class _WatchedIterator(Iterator[Any]):
    """An iterator that calls `watch` with each item before it returns the item."""

    def __init__(self, inner: Any, watch: Callable[[Any], None]) -> None:
        self._inner, self._watch = inner, watch

    def _watched(self, item: Any) -> Any:
        item = watch_iterators(item, self._watch)
        self._watch(item)
        return item

    def __next__(self) -> Any:
        return self._watched(next(self._inner))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)


class _WatchedGenerator(_WatchedIterator, Generator[Any, Any, Any]):
    """The same for a generator, with its methods `send`, `throw` and `close`."""

    def send(self, value: Any) -> Any:
        return self._watched(self._inner.send(value))

    def throw(self, *error: Any) -> Any:
        return self._watched(self._inner.throw(*error))

    def close(self) -> None:
        self._inner.close()
