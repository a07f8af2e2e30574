"""Accepts other spellings of values that published configurations use, if they can have only one meaning.

Before the strict validation, the document and the schema are walked together, and these spellings are replaced:

* 1 and 0 where true or false is expected;
* a choice in other capitals (`"WARN"` for `"Warn"`, `"SUM"` for `"sum"`);
* one text where a list of texts is expected, in the keys of `_ONE_OR_MANY`.

Other values that do not fit are left unchanged, and the validation reports them. Text is never read as a number or a
boolean.
"""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic import BaseModel

from .translate import model_in, named_model_in

__all__ = ["read_leniently"]

_ONE_OR_MANY = frozenset(f"zero_optimization.leaf_module.{name}" for name in ("classes", "names", "name_suffixes"))


def read_leniently(data: dict[str, Any], model: type[BaseModel], prefix: str = "") -> None:
    """Replace other spellings of values in `data` by those that `model` documents.

    Args:
        data: an object of the document; changed in place.
        model: the model that describes it.
        prefix: dotted path of the object, with a dot at its end; empty for the document.
    """
    for name, field in model.model_fields.items():
        if name not in data:
            continue
        value, path = data[name], f"{prefix}{name}"
        if isinstance(value, dict):
            _read_object(value, field.annotation, path)
        elif isinstance(value, str) and path in _ONE_OR_MANY:
            data[name] = [value]
        else:
            data[name] = _respelled(value, _alternatives(field.annotation))


def _read_object(value: dict[str, Any], annotation: Any, path: str) -> None:
    named, inner = named_model_in(annotation), model_in(annotation)
    if inner is not None:
        read_leniently(value, inner, f"{path}.")
    elif named is not None:
        for key, item in value.items():
            if isinstance(item, dict):
                read_leniently(item, named, f"{path}.{key}.")


def _respelled(value: Any, alternatives: list[Any]) -> Any:
    if type(value) is int and value in (0, 1) and bool in alternatives and not {int, float} & set(alternatives):
        return bool(value)
    if isinstance(value, str):
        choices = [choice for choice in alternatives if isinstance(choice, str)]
        if value not in choices:
            return next((choice for choice in choices if choice.lower() == value.lower()), value)
    return value


def _alternatives(annotation: Any) -> list[Any]:
    """Return the types and the literal values that an annotation allows."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _alternatives(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return [found for argument in arguments for found in _alternatives(argument)]
    return list(arguments) if origin is typing.Literal else [annotation]
