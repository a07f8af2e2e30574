"""Sections of a configuration that extensions bring (`dsx.Extension.section`): found, and put beside dsx's own.

An extension that is installed is an entry point of the group `dsx.extensions`; the name of the entry point is the name
of the section. It is loaded only where a configuration has a key of this name, or where all keys are listed (messages
about unknown keys, the reference page, the schema for editors).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import BaseModel, Field, ValidationError, create_model

from ..errors import DsxConfigError, Problem
from .schema import Root

__all__ = [
    "EXTENSIONS",
    "Sections",
    "absent_section",
    "installed",
    "no_effect",
    "root_model",
    "sections_for",
    "whole_model",
]

EXTENSIONS = "dsx.extensions"
"""Group of entry points: classes (or functions without arguments) that make an extension, by name of the section."""

Sections = Mapping[str, type[BaseModel]]
"""Model of each section that an extension brings, by name."""


def installed() -> dict[str, EntryPoint]:
    """The extensions of installed packages, by the name of their section."""
    return {one.name: one for one in entry_points(group=EXTENSIONS)}


def sections_for(keys: Iterable[str], given: Sections | None = None) -> dict[str, type[BaseModel]]:
    """The sections of extensions that a document may have: those given, and those installed that it names.

    Args:
        keys: of the document.
        given: the sections of the extensions that the caller has made.

    Raises:
        DsxConfigError: an extension brings a section that dsx has, or a model that accepts unknown keys.
    """
    found = {name: _checked(name, model) for name, model in (given or {}).items()}
    unknown = set(keys) - set(Root.model_fields) - set(found)
    offered = installed() if unknown else {}
    for name in sorted(unknown & set(offered)):
        model = _installed_section(offered[name])
        if model is not None:
            found[name] = model
    return found


def absent_section(name: str) -> Any:
    """A section of an installed extension that the document does not have, with its defaults.

    Raises:
        KeyError: no installed extension has a section of this name.
    """
    model = _installed_section(installed()[name])
    if model is None:
        raise KeyError(name)
    return _defaults(model)


def whole_model(given: Sections | None = None) -> type[Root]:
    """The model of all keys: those of dsx, the sections given, and those of every installed extension."""
    found = {name: _installed_section(one) for name, one in sorted(installed().items())}
    return root_model({**{name: model for name, model in found.items() if model is not None}, **(given or {})})


def root_model(sections: Sections) -> type[Root]:
    """The model of a document with these sections beside those of dsx."""
    return _composed(tuple(sections.items())) if sections else Root


def no_effect(model: type[BaseModel]) -> dict[str, str]:
    """The keys without an effect in the sections of extensions: path -> why (`NO_EFFECT` of a section's model)."""
    own = set(model.model_fields) - set(Root.model_fields)
    found = {name: model.model_fields[name].annotation for name in own}
    return {
        f"{name}.{key}": reason
        for name, section in found.items()
        for key, reason in getattr(section, "NO_EFFECT", {}).items()
    }


def _installed_section(one: EntryPoint) -> type[BaseModel] | None:
    made = one.load()
    model = getattr(made if isinstance(made, type) else made(), "section", None)
    return None if model is None else _checked(one.name, model)


def _checked(name: str, model: Any) -> type[BaseModel]:
    if not isinstance(model, type) or not issubclass(model, BaseModel) or model.model_config.get("extra") != "forbid":
        shown = model.__name__ if isinstance(model, type) else type(model).__name__
        message, expected = "the section of this extension accepts keys that it does not know", "a pydantic model"
        fix = 'derive it from dsx.config.Section, or set model_config = ConfigDict(extra="forbid")'
        raise DsxConfigError([Problem("value", name, message, got=shown, expected=f"{expected} that refuses them",
                                      fix=fix)], source="extensions")  # fmt: skip
    if name in Root.model_fields:
        raise DsxConfigError([Problem("conflict", name, "an extension brings a section that dsx has", got=name,
                                      expected="a name of its own", fix="rename it")], source="extensions")  # fmt: skip
    return model


def _defaults(model: type[BaseModel]) -> BaseModel | None:
    """The section with its defaults; None if it has keys that must be given."""
    try:
        return model()
    except ValidationError:
        return None


@functools.lru_cache(maxsize=16)
def _composed(sections: tuple[tuple[str, type[BaseModel]], ...]) -> type[Root]:
    fields: dict[str, Any] = {
        name: (model, Field(default_factory=functools.partial(_defaults, model), description=_title(model)))
        for name, model in sections
    }

    def reduce(self: BaseModel, protocol: Any) -> tuple[Any, ...]:
        # Python finds a class by its name when it reads a pickle, and this one has been made here.
        return _restored, (sections, self.__getstate__())

    made = create_model("Root", __base__=Root, __module__=__name__, **fields)
    made.__reduce_ex__ = reduce  # type: ignore[method-assign]
    return made


def _restored(sections: tuple[tuple[str, type[BaseModel]], ...], state: dict[Any, Any]) -> BaseModel:
    model = _composed(sections)
    made = model.__new__(model)
    made.__setstate__(state)
    return made


def _title(model: type[BaseModel]) -> str:
    text = (model.__doc__ or "").strip().split("\n\n")[0].split("\n")[0].rstrip(".")
    return text[:1].lower() + text[1:]
