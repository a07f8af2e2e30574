"""Translates pydantic's errors into ours: path, the value found, the expected values, the nearest known name.

It also gives the known names at any path of the schema, so that a mistyped key is compared with its neighbours first
and with the whole schema second.
"""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Callable, Iterator
from typing import Any

from dsx_core import shorten
from dsx_core.errors import edits, nearest
from pydantic import BaseModel, ValidationError

from ..errors import Problem
from .describe import type_text
from .normal import SECOND_NAMES

__all__ = [
    "MOST_PROBLEMS",
    "all_paths",
    "known_names",
    "model_in",
    "named_model_in",
    "problems_of",
    "section_at",
    "show",
]

_EXPECTED = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object { ... }",
    "model_type": "an object { ... }",
    "model_attributes_type": "an object { ... }",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


MOST_PROBLEMS = 100
"""The most problems that are shown. A file with more is not a configuration, and finding the place of each takes
time.
"""


def problems_of(
    error: ValidationError, model: type[BaseModel], where: Callable[[tuple[str | int, ...]], str]
) -> list[Problem]:
    """Translate all errors of one validation.

    Args:
        error: the error that pydantic raised.
        model: the root model that was validated.
        where: returns the place in the file of a key path.
    """
    found: dict[str, Problem] = {}
    errors = error.errors(include_url=False)
    for item in errors[:MOST_PROBLEMS]:
        problem = _problem(item, model, where)
        # A union reports one error per branch; the first branch is the documented form of the key.
        found.setdefault(problem.path, problem)
    if len(errors) > MOST_PROBLEMS:
        left = Problem(
            "value", "", f"there are {len(errors) - MOST_PROBLEMS} more problems of this kind", fix="mend these first"
        )
        found.setdefault(left.path, left)
    return list(found.values())


def _problem(item: Any, model: type[BaseModel], where: Any) -> Problem:
    loc = tuple(part for part in item["loc"] if not (isinstance(part, str) and _is_tag(part)))
    path = ".".join(map(str, loc))
    place, kind, context = where(loc), item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(loc, path, model, place)
    if kind == "missing":
        return Problem("missing", path, "this key is required here", expected=_expected_at(model, loc), where=place,
                       fix=f'add "{loc[-1]}"; "auto" cannot be resolved for it')  # fmt: skip
    got = show(item["input"])
    if kind == "literal_error":
        return _not_among(path, item["input"], context["expected"], place, _expected_at(model, loc))
    if kind in _EXPECTED:
        expected = _expected_at(model, loc) or _EXPECTED[kind]
        return Problem("type", path, "wrong type", got=f"{got} ({_kind(item['input'])})", expected=expected,
                       where=place, fix=_type_fix(item["input"], expected))  # fmt: skip
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return Problem("value", path, "the value is out of range", got=got, where=place,
                       expected=_expected_at(model, loc) or f"a number {words} {context[name]:g}",
                       fix=f"choose a number {words} {context[name]:g}")  # fmt: skip
    message = str(context["error"]) if "error" in context else item["msg"]
    return Problem("value", path, message, got=got, expected=_expected_at(model, loc), where=place,
                   fix="see docs/config.md for this key")  # fmt: skip


def _unknown(loc: tuple[str | int, ...], path: str, model: type[BaseModel], place: str) -> Problem:
    name = str(loc[-1])
    shown = shorten(name)
    near = nearest(name, known_names(model, loc[:-1]))
    elsewhere = [other for other in all_paths(model) if other.rsplit(".", 1)[-1] == name]
    prefix = ".".join(map(str, loc[:-1])) + "." if len(loc) > 1 else ""
    exact_elsewhere = elsewhere and not any(edits(name, other) <= 1 for other in near)
    if exact_elsewhere:
        expected, fix = " or ".join(elsewhere[:3]), f"move it to {elsewhere[0]}"
    elif near:
        expected = " or ".join(prefix + other for other in near)
        fix = f'did you mean "{near[0]}"?' if len(near) == 1 else "did you mean one of these?"
    else:
        names = sorted(known_names(model, loc[:-1]))
        expected = f"one of {', '.join(names)}" if len(names) <= 20 else "a key of docs/config.md"
        fix = "remove it, or see docs/config.md for all keys"
    return Problem(
        "unknown-key", path, f'unknown key "{shown}"', got=f'"{shown}"',
        expected=expected, fix=fix, where=place,
    )  # fmt: skip


def _not_among(path: str, value: Any, choices: str, place: str, expected: str) -> Problem:
    fix = "choose one of these"
    if isinstance(value, str):
        near = nearest(value, [part.strip(" '") for part in choices.replace(" or ", ", ").split(",")], limit=1)
        fix = f'did you mean "{near[0]}"?' if near else fix
    text = expected or choices.replace("'", '"')
    return Problem(
        "value", path, "this value is not one of the choices", got=show(value), expected=text, fix=fix, where=place
    )


def _type_fix(value: Any, expected: str) -> str:
    if isinstance(value, str) and value.lower() in ("true", "false") and "true or false" in expected:
        return f"write {value.lower()} without quotes"
    if isinstance(value, str) and "number" in expected:
        try:
            float(value)
        except ValueError:
            return f"write {expected}"
        return f"write {value} without quotes"
    return f"write {expected}"


def show(value: Any) -> str:
    """Return a value as short JSON text."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _is_tag(part: str) -> bool:
    """Whether a part of pydantic's location names a validator or a union branch instead of a key."""
    return part.startswith(("function-", "literal[", "lax-or-strict[", "json-or-python[")) or part in (
        "int", "float", "str", "bool", "constrained-int", "constrained-float"
    )  # fmt: skip


# - the schema as a tree of names


def section_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> type[BaseModel] | None:
    """Return the model that describes the object at a path; None if there is none."""
    current: Any = model
    for part in loc:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(part))
            current = None if field is None else _model_in(field.annotation)
        elif isinstance(current, _Named):
            current = current.model
        else:
            return None
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside an annotation such as ``Model | None``; None if there is none."""
    found = _model_in(annotation)
    return found if isinstance(found, type) else None


def named_model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model of objects whose names the user chooses (``dict[str, Model]``); None for anything else."""
    found = _model_in(annotation)
    return found.model if isinstance(found, _Named) else None


class _Named:
    """Objects of one model whose names the user chooses."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model


def _model_in(annotation: Any) -> Any:
    """Return the model, or the names-to-model mapping, inside an annotation such as ``Model | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is dict:
        inner = _model_in(arguments[1])
        return _Named(inner) if isinstance(inner, type) else None
    for argument in arguments:
        found = _model_in(argument)
        if found is not None:
            return found
    return None


def known_names(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    """Return the keys that the object at a path may have, including second names."""
    section = section_at(model, loc)
    if section is None:
        return []
    prefix = ".".join(map(str, loc))
    second = [name.rpartition(".")[2] for name in SECOND_NAMES if name.rpartition(".")[0] == prefix]
    return [*section.model_fields, *_aliases(section), *second]


def _aliases(section: type[BaseModel]) -> Iterator[str]:
    for field in section.model_fields.values():
        alias = field.validation_alias
        choices = getattr(alias, "choices", [alias])
        yield from (choice for choice in choices if isinstance(choice, str))


@functools.cache
def all_paths(model: type[BaseModel], prefix: str = "") -> tuple[str, ...]:
    """Return the dotted path of every key of the schema; a name that the user chooses appears as ``*``."""
    paths = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        paths.append(path)
        inner = _model_in(field.annotation)
        if isinstance(inner, _Named):
            paths += all_paths(inner.model, f"{path}.*.")
        elif inner is not None:
            paths += all_paths(inner, f"{path}.")
    return tuple(paths)


def _expected_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> str:
    """Describe the allowed values at a path, with the documented default."""
    owner = section_at(model, loc[:-1]) if loc else None
    field = owner.model_fields.get(str(loc[-1])) if owner else None
    if field is None:
        return ""
    text = type_text(field)
    if field.is_required():
        return text
    default = field.get_default(call_default_factory=True)
    return text if isinstance(default, BaseModel) else f"{text} (default {show(default)})"
