"""``load_config``: reads, normalises, validates, cross-checks and completes a configuration.

All problems of one pass are raised together. Nothing here communicates or uses a device: the same document gives the
same result, and the same error text, on every rank. Warnings are kept in ``Config.warnings``; the engine logs them
once, on one rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from dsx_core import with_code
from pydantic import BaseModel, ValidationError

from ..errors import DsxConfigError, PrecisionError, Problem
from ..precision import Precision, resolve_precision
from .availability import MEANINGLESS, asks_for, meaningless, not_yet
from .batch import ACCUMULATION, MICRO, TRAIN, BatchSizes, resolve_batch
from .components import component_problems
from .elastic import elastic_batch
from .lenient import read_leniently
from .model import Config
from .normal import Normalised, normalise
from .report import UsageTracker, leaves
from .rules import conflicts, notices
from .schema import Root
from .sections import Sections, judged, root_model, sections_for, whole_model
from .source import Document, read
from .translate import MOST_PROBLEMS, problems_of

__all__ = ["load_config"]

_NO_EFFECT = "DSX151"
"""The code of warnings about keys that change nothing, or something else than usual."""


def load_config(source: Any, *, world_size: int, template: bool = False, sections: Sections | None = None) -> Config:
    """Load a configuration.

    Args:
        source: dictionary, path of a JSON file (comments, trailing commas and bare keys allowed), or base64 text of
            JSON.
        world_size: number of data-parallel ranks; the batch arithmetic needs it.
        template: all batch sizes may be "auto", because another program sets them before training. Then the micro batch
            is taken as 1, with a warning.
        sections: models of the sections of extensions that `initialize` is given, by name. Those of installed
            extensions are found here.

    Raises:
        DsxConfigError: with every problem found.
    """
    document = read(source)
    model = root_model(sections_for(document.data, sections))
    ready = normalise(document.data, set(model.model_fields) - set(Root.model_fields))
    read_leniently(ready.data, model)
    if template:
        _fill_template(ready)
    where = _place_of(document, ready)
    root, broken, problems = _validate(ready, where, model, sections)
    problems = [*ready.problems, *problems]
    batch, precision = _complete(root, world_size, broken, problems, where, frozenset(ready.auto))
    problems += [item for item in conflicts(root, world_size, where) if item.path not in broken]
    problems += [item for item in component_problems(root, where) if not _under(item.path, broken)]
    problems += [item for item in not_yet(root, where) if not _under(item.path, broken)]
    if problems or batch is None or precision is None:
        raise DsxConfigError(_without_repeats(problems), source=document.name)
    return _build(root, batch, precision, document, ready)


def _fill_template(ready: Normalised) -> None:
    """If every batch size is "auto", set the micro batch to 1, so that the document can be checked."""
    if MICRO in ready.auto and not {TRAIN, MICRO} & set(ready.data):
        ready.data[MICRO] = 1
        ready.notes.append(
            f'{MICRO} is "auto" and nothing else gives a batch size: it is taken as 1 here. Training needs a number; '
            "programs such as the Hugging Face Trainer set it"
        )


def _validate(
    ready: Normalised, where: Callable[[str], str], model: type[Root], given: Sections | None
) -> tuple[Any, set[str], list[Problem]]:
    """Validate. Wrong values are taken out and the rest is validated again, so that cross-checks see everything that is
    valid.
    """
    data = copy.deepcopy(ready.data)
    problems: list[Problem] = []
    broken: set[str] = set()
    for _ in range(8):
        try:
            return model.model_validate(data), broken, problems
        except ValidationError as error:
            known = whole_model(given) if any(item["type"] == "extra_forbidden" for item in error.errors()) else model
            found = problems_of(error, known, lambda loc: where(".".join(map(str, loc))))
            problems += found
            if error.error_count() > MOST_PROBLEMS:
                break  # enough problems are shown; taking out so many keys one by one would take minutes
            for item in found:
                broken.add(item.path)
                if not _take_out(data, item.path):
                    data.pop(item.path.split(".")[0], None)
    return model.model_validate({}), broken | set(ready.data), problems


def _take_out(data: dict[str, Any], path: str) -> bool:
    """Remove the key at a path; returns False if there is none (then the whole section has to be removed)."""
    owner: Any = data
    parts = path.split(".")
    for index, part in enumerate(parts):
        if not isinstance(owner, dict):
            # Inside a list: only the whole list can be removed.
            return _take_out(data, ".".join(parts[: index - 1])) if index > 1 else False
        if part not in owner:
            return False
        if index == len(parts) - 1:
            del owner[part]
            return True
        owner = owner[part]
    return False


def _complete(
    root: Any,
    world_size: int,
    broken: set[str],
    problems: list[Problem],
    where: Callable[[str], str],
    auto: frozenset[str],
) -> tuple[BatchSizes | None, Precision | None]:
    """Resolve batch sizes and data types; contradictions are added to ``problems``."""
    batch: BatchSizes | None = None
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        problems.append(
            Problem("value", "world_size", "the number of ranks is wrong", got=str(world_size), expected="at least 1")
        )
    elif not broken & {TRAIN, MICRO, ACCUMULATION}:
        given = {
            TRAIN: root.train_batch_size,
            MICRO: root.train_micro_batch_size_per_gpu,
            ACCUMULATION: root.gradient_accumulation_steps,
        }
        if root.elasticity.enabled and "elasticity" not in broken:
            resolved = elastic_batch(root.elasticity, given, world_size, auto)
        else:
            resolved = resolve_batch(given, world_size, auto)
        if isinstance(resolved, Problem):
            problems.append(resolved)
        else:
            batch = resolved
    precision: Precision | None = None
    try:
        precision = resolve_precision(root)
    except PrecisionError as error:
        path = "data_types" if root.data_types.model_fields_set else "communication_data_type"
        problems.append(
            Problem("conflict", path, str(error), where=where(path), fix="see the table of precision in docs/config.md")
        )
    return batch, precision


def _build(root: Any, batch: BatchSizes, precision: Precision, document: Document, ready: Normalised) -> Config:
    origin = document.name if document.name in ("dictionary", "base64 text") else "file"
    origins = {path: origin for path, _ in leaves(ready.data)}
    origins.update({path: "auto" for path in ready.auto})
    origins.update({key: "auto" if key in ready.auto else "derived" for key in batch.derived})
    warnings = [*ready.notes, *(with_code(notice, _NO_EFFECT) for notice in notices(root))]
    given = dict(leaves(ready.data))
    warnings += [
        with_code(f"{path}: {reason}", _NO_EFFECT)
        for path, reason in judged(type(root), "OLD_NAMES").items()
        if path in given
    ]
    without_effect = {**MEANINGLESS, **judged(type(root), "NO_EFFECT")}
    ignored = meaningless(given, without_effect)
    if ignored:
        told = with_code("these keys are accepted and mean nothing here", _NO_EFFECT)
        warnings.append("\n  ".join([f"{told}:", *ignored]))
    names = {*without_effect, *(name.split(":")[0] for name in ignored)}
    configured = [key for key in ready.data if key not in names and _is_active(root, key)]
    tracker = UsageTracker(configured)
    tracker.mark("elasticity")  # it is used here: the batch sizes come from it
    return Config(
        root=root,
        batch=batch,
        precision=precision,
        source=document.name,
        warnings=tuple(warnings),
        origins=origins,
        tracker=tracker,
    )


def _is_active(root: Any, key: str) -> bool:
    """Whether a configured key asks for a feature; null and a section that is switched off do not."""
    value = getattr(root, key)
    if value is None:
        return False
    return asks_for(value, None) if isinstance(value, BaseModel) and "enabled" in type(value).model_fields else True


def _place_of(document: Document, ready: Normalised) -> Callable[[str], str]:
    def place(path: str) -> str:
        for documented, written in ready.moved.items():
            if path == documented or path.startswith(documented + "."):
                path = written + path[len(documented) :]
        return document.place(tuple(int(part) if part.isdigit() else part for part in path.split(".")))

    return place


def _under(path: str, broken: set[str]) -> bool:
    return any(path == other or path.startswith(other + ".") for other in broken)


def _without_repeats(problems: list[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))
