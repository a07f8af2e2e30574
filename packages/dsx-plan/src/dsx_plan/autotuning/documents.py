"""Configurations as people write them: values at dotted paths, and which keys hold several values to try.

A list where the schema wants one value is a list of values to try: `"reduce_bucket_size": [5e7, 5e8]`. Inside free-form
objects, such as the arguments of an optimizer, a list is what it always was (`"betas": [0.9, 0.95]`).

Pure functions over plain dictionaries.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["leaves", "lists_to_try", "value_at", "with_values", "without"]

ZERO = "zero_optimization"


def value_at(document: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where there is none. `zero_optimization: true` is stage 1."""
    found: Any = document
    for part in path.split("."):
        if isinstance(found, bool):
            found = {"stage": int(found)}
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return found


def with_values(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a document with values at dotted paths; objects on the way are made."""
    result = copy.deepcopy(dict(document))
    for path, value in values.items():
        owner = result
        *sections, name = path.split(".")
        for part in sections:
            inner = owner.get(part)
            if isinstance(inner, bool) and part == ZERO:
                inner = {"stage": int(inner)}
            owner[part] = inner if isinstance(inner, dict) else {}
            owner = owner[part]
        owner[name] = copy.deepcopy(value)
    return result


def without(document: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """A copy of a document without some of its top-level keys."""
    return {key: copy.deepcopy(value) for key, value in document.items() if key not in keys}


def lists_to_try(
    document: Mapping[str, Any], value_type: Callable[[str], Any | None], *, leave_out: frozenset[str] = frozenset()
) -> dict[str, tuple[Any, ...]]:
    """Dotted path -> values of every key that holds a list where the schema wants one value.

    Args:
        document: a configuration as it was written.
        value_type: the annotation of the key at a path, or None (`EngineToPlan.value_type`).
        leave_out: top-level keys that are not looked at.
    """
    found = {}
    for path, value in leaves(document):
        if isinstance(value, list) and path.split(".")[0] not in leave_out and not _admits_list(value_type(path)):
            found[path] = tuple(value)
    return found


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of everything in nested objects; lists and empty objects are values."""
    for key, item in value.items():
        path = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            yield from leaves(item, f"{path}.")
        else:
            yield path, item


def _admits_list(annotation: Any | None) -> bool:
    """Whether a value may be a list. Of an unknown key it may: then the ordinary checks speak."""
    return annotation is None or _mentions_list(annotation)


def _mentions_list(annotation: Any) -> bool:
    if annotation is Any or annotation in (list, tuple, dict):
        return True
    if typing.get_origin(annotation) in (list, tuple, dict):
        return True
    return any(_mentions_list(part) for part in typing.get_args(annotation) if not isinstance(part, str))
