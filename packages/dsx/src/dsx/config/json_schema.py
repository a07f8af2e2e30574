"""The JSON schema of a configuration, for editors: completion, hover texts, and marks at values that the loader would
refuse.

pydantic gives names, types and texts. This module adds four things that it does not know.

* Limits of numbers get their names in JSON schema (`minimum`, not `ge`).
* Spellings that are accepted before validation: `"auto"` for every value, `zero_optimization: true`, null for a
  section, second names of keys, 1 and 0 for booleans, choices in other capitals, and `"$schema"` itself.
* `optimizer` and `scheduler`: every type, in any case, with the names and types of its arguments.
* Keys that are not available yet say so in their text.

Left out: conflicts between keys, and the batch arithmetic, which only the loader checks.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

from .availability import MEANINGLESS, REFUSED
from .components import OPTIMIZER_ARGUMENTS, argument_schema, optimizer_classes, torch_classes
from .normal import SECOND_NAMES, SECTIONS_THAT_MAY_BE_NULL
from .schema import Root
from .sections import judged, whole_model

__all__ = ["json_schema"]

_LIMITS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_AUTO = {"const": "auto", "description": "let dsx choose"}


def json_schema() -> dict[str, Any]:
    """Return the schema (JSON schema, draft 2020-12) as JSON values."""
    from .. import __version__  # lazy import: this module is imported by the package it asks

    root = whole_model()
    schema = root.model_json_schema()
    sections = schema.pop("$defs")
    properties = schema["properties"]
    properties["optimizer"] = _component("optimizer")
    properties["scheduler"] = _component("scheduler")
    _describe_availability(schema, sections, root)
    for section in (schema, *sections.values()):
        _read_like_the_loader(section)
    zero = properties["zero_optimization"]
    zero["anyOf"].append({"type": "boolean", "description": "true is stage 1, false is stage 0"})
    for name in sorted((SECTIONS_THAT_MAY_BE_NULL | set(root.model_fields) - set(Root.model_fields)) & set(properties)):
        properties[name].setdefault("anyOf", []).append({"type": "null"})
    _add_second_names(schema, sections)
    properties["$schema"] = {"type": "string", "description": "the schema that an editor checks this file against"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:dsx:config:{__version__}",
        **schema,
        "title": "Configuration of dsx",
        "$defs": sections,
    }


def _read_like_the_loader(section: dict[str, Any]) -> None:
    """Rename limits, and allow for every property of one object the spellings that the loader accepts."""
    for name, value in section.get("properties", {}).items():
        text = value.pop("description", "") if isinstance(value, dict) else ""
        default = {"default": value.pop("default")} if "default" in value else {}
        value.pop("title", None)
        alternatives = value["anyOf"] if set(value) == {"anyOf"} else [value]
        more = [extra for item in alternatives for extra in _other_spellings(item)]
        section["properties"][name] = {
            "description": text,
            **default,
            "anyOf": [*map(_with_limits, alternatives), *more, _AUTO],
        }


def _with_limits(value: dict[str, Any]) -> dict[str, Any]:
    return {_LIMITS.get(key, key): _with_limits(item) if key == "items" else item for key, item in value.items()}


def _other_spellings(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the other spellings of `value` that `lenient.py` accepts."""
    if value.get("type") == "boolean":
        yield {"enum": [0, 1]}
    choices = value.get("enum", [value["const"]] if "const" in value else [])
    texts = [choice for choice in choices if isinstance(choice, str)]
    if texts:
        yield {"type": "string", "pattern": _any_case(texts)}
    if value.get("type") == "array" and value.get("items", {}).get("type") == "string":
        yield {"type": "string", "description": "one text, read as a list of one"}


def _any_case(texts: list[str]) -> str:
    """Return a pattern for one of `texts` in any case; JSON schema's patterns have no switch for that."""

    def letter(char: str) -> str:
        if char.isalpha() and char.lower() != char.upper():
            return f"[{char.upper()}{char.lower()}]"
        return "\\" + char if char in ".-+*?()[]{}|^$\\" else char

    return f"^({'|'.join(''.join(map(letter, text)) for text in texts)})$"


def _component(key: str) -> dict[str, Any]:
    """Return the schema of `optimizer` or `scheduler`: the types, and per type its arguments."""
    known: dict[str, dict[str, Any]] = {}
    if key == "optimizer":
        known.update({name: {argument: argument_schema(argument) for argument in arguments}
                      for name, arguments in OPTIMIZER_ARGUMENTS.items()})  # fmt: skip
        known.update(_signatures(optimizer_classes(), "params", known))
    else:
        from ..lr_schedules import SCHEDULES  # lazy import: only this command pays for it

        known.update(_signatures(SCHEDULES, "optimizer", {}))
        known.update(_signatures(torch_classes("torch.optim.lr_scheduler"), "optimizer", known))
    section = Root.model_fields[key].annotation.__args__[0]  # type: ignore[union-attr]
    inner = section.model_json_schema()["properties"]
    branches = []
    for name, arguments in known.items():
        if arguments is None:
            continue
        params = {"type": "object", "properties": arguments, "additionalProperties": False}
        branches.append(
            {
                "if": {"properties": {"type": {"type": "string", "pattern": _any_case([name])}}, "required": ["type"]},
                "then": {"properties": {"params": params}},
            }
        )
    return {
        "description": Root.model_fields[key].description or "",
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    **inner,
                    "type": {**inner["type"], "anyOf": [{"enum": list(known)}, {"pattern": _any_case(list(known))}]},
                },
                "required": ["type"],
                "additionalProperties": False,
                "allOf": branches,
            },
            {"type": "null"},
        ],
    }


def _signatures(classes: Any, skipped: str, known: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of every class that is not `known`; None for one that takes any argument."""
    found: dict[str, Any] = {}
    for name, value in classes.items():
        parameters = inspect.signature(value).parameters
        if name.lower() in {other.lower() for other in known}:
            continue
        if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values()):
            found[name] = None
            continue
        found[name] = {
            item.name: {**argument_schema(item.name), **_default_of(item)}
            for item in parameters.values()
            if item.name not in (skipped, "last_batch_iteration")
        }
    return found


def _default_of(parameter: inspect.Parameter) -> dict[str, Any]:
    try:
        return (
            {}
            if parameter.default is inspect.Parameter.empty
            else {"default": json.loads(json.dumps(parameter.default))}
        )
    except (TypeError, ValueError):
        return {}


def _describe_availability(schema: dict[str, Any], sections: dict[str, Any], root: type[Root]) -> None:
    """Add to the text of a key that it is not available yet, or has no effect here."""
    notes = {path: f"not available yet: {reason}" for path, reason in judged(root, "NOT_YET").items()}
    notes.update({path: f"not supported: {reason}" for path, reason in REFUSED.items()})
    without_effect = {**MEANINGLESS, **judged(root, "NO_EFFECT")}
    notes.update({path: f"accepted without effect: {reason}" for path, reason in without_effect.items()})
    for path, note in notes.items():
        *parents, name = path.split(".")
        owner: Any = schema
        for part in parents:
            owner = _section_of(owner["properties"].get(part, {}), sections)
        target = owner.get("properties", {}).get(name)
        if target is not None:
            target["description"] = f"{target.get('description', '')} ({note})".lstrip()


def _section_of(value: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    for item in (value, *value.get("anyOf", ()), *value.get("allOf", ())):
        if "$ref" in item:
            return sections[item["$ref"].rsplit("/", 1)[1]]
    return {"properties": {}}


def _add_second_names(schema: dict[str, Any], sections: dict[str, Any]) -> None:
    for second, first in SECOND_NAMES.items():
        *parents, old = second.split(".")
        owner: Any = schema
        for part in parents:
            owner = _section_of(owner["properties"][part], sections)
        value = owner["properties"][first.rsplit(".", 1)[-1]]
        owner["properties"][old] = {**value, "description": f"second name of {first}"}
