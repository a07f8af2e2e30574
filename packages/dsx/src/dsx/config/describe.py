"""Describes a field's type in words: ``a whole number of at least 1, or null``."""

from __future__ import annotations

import json
import types
import typing
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

__all__ = ["type_text"]

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_BOUND_WORDS = (("ge", "of at least"), ("gt", "greater than"), ("le", "at most"), ("lt", "less than"))


def type_text(field: FieldInfo) -> str:
    """Describe what a field accepts."""
    return _words(field.annotation, list(field.metadata))


def _words(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _words(arguments[0], [*_flat(arguments[1:]), *metadata])
    if origin is typing.Literal:
        choices = ", ".join(json.dumps(choice) for choice in arguments)
        return choices if len(arguments) == 1 else f"one of {choices}"
    if origin in (typing.Union, types.UnionType):
        parts = list(dict.fromkeys(_words(part, metadata) for part in arguments if part is not type(None)))
        return ", or ".join([*parts, "null"] if type(None) in arguments else parts)
    if origin in (list, tuple):
        return f"a list of {_plural(_words(arguments[0], []))}" if arguments else "a list"
    if origin is dict:
        return "an object { ... }"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "an object { ... }"
    text = _PLAIN.get(annotation, getattr(annotation, "__name__", str(annotation)))
    for item in metadata:
        if hasattr(item, "multiple_of"):
            text = f"a multiple of {item.multiple_of:g}"
    bounds = [
        f"{words} {getattr(item, name):g}" for item in metadata for name, words in _BOUND_WORDS if hasattr(item, name)
    ]
    return " ".join([text, " and ".join(bounds)]).strip()


def _flat(metadata: Any) -> list[Any]:
    """Return constraint objects; a ``Field(...)`` inside ``Annotated`` has its own list of them."""
    flat: list[Any] = []
    for item in metadata:
        flat.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return flat


def _plural(text: str) -> str:
    words = ("whole number", "number", "multiple", "list")
    for singular, plural in ((f"a {word}", f"{word}s") for word in words):
        if text.startswith(singular):
            return plural + text[len(singular) :]
    return text + "s" if text.startswith("object") else text
