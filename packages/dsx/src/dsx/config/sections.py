"""Sections of a configuration that extensions bring (`dsx.Extension.section`): found, and put beside dsx's own.

An extension that is installed is an entry point of the group `dsx.extensions`; the name of the entry point is the name
of the section. It is loaded only where a configuration has a key of this name, or where all keys are listed (messages
about unknown keys, the reference page, the schema for editors).
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Iterator, Mapping
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
    "judged",
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


@functools.lru_cache(maxsize=1024)  # more than there are sections, which are asked one in another
def judged(model: type[BaseModel], table: str) -> dict[str, str]:
    """The sections' own judgements of their keys: path -> text.

    Args:
        model: of the whole document.
        table: name of the class attribute in which a section's model maps its keys ("" is the section itself) to texts:
            `NO_EFFECT`: why a key changes nothing; `NOT_YET`: why a key cannot be used; `OLD_NAMES`: what a key is read
            as; `BETTER` and `DIFFERS`: how its effect compares with DeepSpeed's.
    """
    found = {}
    for name, field in model.model_fields.items():
        for section in _sections_in(field.annotation):
            own: Mapping[str, str] = getattr(section, table, {})
            inner = {**own, **judged(section, table)}
            found.update({f"{name}.{key}" if key else name: text for key, text in inner.items()})
    return found


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in the annotation of a field that holds a section or None."""
    for one in (annotation, *typing.get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            yield one


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
