"""Outputs that are iterators: a generator, `map`, `zip` or `iter(...)`. A search for tensors would consume them, so
they are replaced by iterators that check each item when it is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, MutableMapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["watch_iterators"]

_CLOSED = (torch.Tensor, nn.Module, type, ModuleType, FunctionType, str, bytes, int, float, type(None))
"""Types of objects in which no iterator is searched."""


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
