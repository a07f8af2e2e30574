"""Writes ``typed.py``: the keys of a configuration as types, made from the model that also checks them.

`dsx config types` prints the file. Left out: second names of keys, and other spellings of values that the loader
accepts; the types say what docs/config.md says.
"""

from __future__ import annotations

import re
import textwrap
from functools import cache
from typing import Any

from .sections import whole_model

__all__ = ["class_name", "source"]

_HEAD = '''"""The keys of a configuration as types, so that an editor completes them and marks a misspelt one.

    config = dsx.Config(
        train_batch_size=32, zero_optimization=dsx.Zero(stage=3, offload_optimizer=dsx.OffloadOptimizer(device="cpu"))
    )
    config: dsx.Config = {"train_batch_size": 32, "zero_optimization": {"stage": 3}}

Each type is a `TypedDict`: calling it makes a dictionary, which `dsx.initialize` takes as any other, and json can
write. What the keys mean is in docs/config.md. Every value may also be "auto", which leaves the choice to dsx.

Written by `dsx config types`; a test compares this file with the model of the keys.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

'''
_SIMPLE = {"integer": "int", "number": "float", "boolean": "bool", "string": "str", "null": "None"}
_WIDTH = 120


def source() -> str:
    """Return the text of ``typed.py``."""
    schema = whole_model().model_json_schema()
    sections = {class_name(name): section for name, section in schema["$defs"].items()}
    names = ", ".join(f'"{name}"' for name in sorted(["Config", *sections]))
    rows = textwrap.wrap(f"{names},", _WIDTH, initial_indent="    ", subsequent_indent="    ")
    lines = ["__all__ = [", *rows, "]  # fmt: skip", "", 'Auto = Literal["auto"]', ""]
    for name, section in sorted(sections.items()):
        lines += _class(name, section)
    lines += _class("Config", {**schema, "description": "A whole configuration."})
    return _HEAD + "\n".join(lines).rstrip() + "\n"


def class_name(model: str) -> str:
    """The name of a section's type: that of its model, without the words Config and Section, unless another model has
    that name.
    """
    short = model.removesuffix("Config").removesuffix("Section")
    return model if short != model and short in _models() else short


@cache
def _models() -> frozenset[str]:
    return frozenset(whole_model().model_json_schema()["$defs"])


def _class(name: str, section: dict[str, Any]) -> list[str]:
    text = re.split(r"(?<=\.)\s", " ".join(section.get("description", "").split()))[0] or f"The section {name}."
    lines = ["", f"class {name}(TypedDict, total=False):", f'    """{text}"""', ""]
    for key, value in section.get("properties", {}).items():
        lines += _line(key, _type(value))
    return [*lines, ""]


def _line(key: str, types: list[str]) -> list[str]:
    wanted = [one for one in types if one != "None"]
    choices = [one for one in wanted if one.startswith("Literal[")]
    if choices:
        joined = ", ".join(one[len("Literal[") : -1] for one in choices)
        wanted = [f"Literal[{joined}]", *(one for one in wanted if one not in choices)]
    allowed = wanted if any('"auto"' in one or one == "Any" for one in wanted) else [*wanted, "Auto"]
    allowed += ["None"] * ("None" in types)
    whole = f"    {key}: {' | '.join(allowed)}"
    if len(whole) <= _WIDTH:
        return [whole]
    return [f"    {key}: (", f"        {' | '.join(allowed)}", "    )"]


def _type(value: dict[str, Any]) -> list[str]:
    """The alternatives of a value, in their order."""
    if "anyOf" in value:
        return list(dict.fromkeys(one for part in value["anyOf"] for one in _type(part)))
    if "$ref" in value:
        return [class_name(value["$ref"].rpartition("/")[2])]
    choices = value.get("enum", [value["const"]] if "const" in value else [])
    if choices:
        return ["Literal[" + ", ".join(_literal(choice) for choice in choices) + "]"]
    if value.get("type") == "array":
        return [f"list[{' | '.join(_type(value['items'])) if value.get('items') else 'Any'}]"]
    if value.get("type") == "object":
        inner = value.get("additionalProperties")
        return [f"dict[str, {' | '.join(_type(inner)) if isinstance(inner, dict) else 'Any'}]"]
    return [_SIMPLE[value["type"]]] if "type" in value else ["Any"]


def _literal(choice: Any) -> str:
    return f'"{choice}"' if isinstance(choice, str) else repr(choice)
