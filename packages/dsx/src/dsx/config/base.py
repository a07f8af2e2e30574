"""The base of all sections: a frozen, strict model, and the number types of JSON that people write.

Strict means: text is not a number, and an unknown key is an error. One exception is made here: a whole number may be
written as ``5e8``, because published configurations do so. Other exceptions, such as 1 for ``true``, are in
``lenient.py``.

This module imports pydantic, so only code that loads a configuration imports it.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

__all__ = ["Count", "Int", "Probability", "Ratio", "Real", "Section", "Size", "Toggle", "from_dataclass", "nested"]


class Section(BaseModel):
    """Base of every section: frozen, strict, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class Toggle(Section):
    """A section that is off unless ``enabled`` is true."""

    enabled: bool = Field(False, description="switches the section on")


def _whole(value: Any) -> Any:
    """Turn 5e8 into 500000000; the strict check judges all other values."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
Size = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Real = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Ratio = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


def nested(model: Any, description: str) -> Any:
    """Return a field that holds a section; if it is not given, the section has its defaults."""
    return Field(default_factory=model, description=description)


def from_dataclass(source: type, *, module: str) -> type[Section]:
    """Return the section that a sibling describes as a frozen dataclass, for packages without a validation library.

    Field names, types and defaults are kept; ``metadata["description"]`` documents a field and ``metadata["minimum"]``
    is its smallest value. The docstring of the class documents the section. A tuple is read from a list, because JSON
    has only lists, and ``5e8`` is a whole number.

    Args:
        source: the dataclass.
        module: the module that has the result under the dataclass's name, so that values can be pickled.
    """
    hints = typing.get_type_hints(source)
    fields: dict[str, Any] = {}
    for item in dataclasses.fields(source):
        factory = item.default_factory
        default = factory() if factory is not dataclasses.MISSING else item.default
        lists = typing.get_origin(hints[item.name]) is tuple
        fields[item.name] = (
            Int if hints[item.name] is int else hints[item.name],
            Field(
                default=... if default is dataclasses.MISSING else default,
                description=item.metadata.get("description"),
                ge=item.metadata.get("minimum"),
                strict=False if lists else None,
            ),
        )
    made = create_model(source.__name__, __base__=Section, __module__=module, __doc__=source.__doc__, **fields)
    for name, hint in hints.items():
        if typing.get_origin(hint) is typing.ClassVar:  # the section's judgements of its keys, see `sections.judged`
            setattr(made, name, getattr(source, name))
    return made
