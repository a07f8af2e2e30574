"""Problems of a configuration in words: the path of the key, what was got and expected, and the nearest known name.

Only code that has caught pydantic's error imports this module.
"""

from __future__ import annotations

import re
from typing import Any

from dsx_core import nearest, shorten
from pydantic import BaseModel, ValidationError

from .secrets import without_secrets

__all__ = ["problems_of"]

_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "model_type": "an object { ... }",
}


def problems_of(error: ValidationError, model: type[BaseModel]) -> str:
    """All problems that the validation of `model` has found, in one text."""
    return "; ".join(_problem(item, model) for item in error.errors(include_url=False))


def _problem(item: Any, model: type[BaseModel]) -> str:
    names = [str(part) for part in item["loc"]]
    path, kind, context = ".".join(names), item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        known = list(_section(model, names[:-1]).model_fields)
        return f"{shorten(path)}: unknown key, expected {_meant(names[-1], known)}"
    if "error" in context:
        return f"{path}: {context['error']}"
    value = without_secrets({names[-1]: item["input"]})[names[-1]] if names else item["input"]
    got = f"{path}: got {shorten(repr(value))}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        return f"{got}, expected {_meant(str(item['input']), choices)}"
    return f"{got}, expected {_EXPECTED.get(kind) or item['msg'].removeprefix('Input should be ')}"


def _section(model: type[BaseModel], names: list[str]) -> type[BaseModel]:
    for name in names:
        inner: Any = model.model_fields[name].annotation  # a model: pydantic looked for keys in it
        model = inner
    return model


def _meant(name: str, known: list[str]) -> str:
    """The known names, or the nearest ones as a guess."""
    near = nearest(name, known)
    guess = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
    return f"one of {', '.join(known)}{guess}"
