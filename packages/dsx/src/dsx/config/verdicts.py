"""The effect of each key of a configuration: `dsx config check`.

Each value of the document gets one of four words:

* `used`: it has the effect that docs/config.md describes; the text says what people who know DeepSpeed may not expect;
* `auto`: the decision is left to dsx, or to the program that completes the document;
* `no effect`: it is accepted, and the text says why nothing depends on it;
* `refused`: training does not start; the text says why, and what to do.

`Verdict.deepspeed` says how the effect of a used value compares with DeepSpeed's. The result depends only on the
document, not on other ranks or a device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsx_core import shorten

from ..errors import DsxConfigError, Problem
from .availability import MEANINGLESS
from .load import load_config
from .normal import MEANS_AUTO, SECOND_NAMES
from .report import leaves
from .sections import judged, root_model, sections_for
from .source import read

__all__ = ["BETTER", "DIFFERS", "Verdict", "render", "verdicts"]

BETTER: dict[str, str] = {
    "communication_data_type": "holds for gathers and reductions of every stage",
    "dataloader_drop_last": "the order changes from epoch to epoch and is resumed exactly",
    "gradient_accumulation_steps": "the loss is divided once, whatever the model returns",
    "prescale_gradients": "the division happens once, at every stage",
    "gradient_predivide_factor": "the division happens once, at every stage",
    "bf16.check_grad_overflow": "also checked at stage 3",
    "checkpoint.tag_validation": "rank 0's tag is taken everywhere, so that no rank writes to another folder",
    "fp16.enabled": "also on a CPU; a step is unscaled with the scale of its own backward, at stage 0 too",
}
"""Keys of dsx's own sections that do more than DeepSpeed's; other sections have a table of their own."""

DIFFERS: dict[str, str] = {
    "steps_per_print": "10 unless it is set, as documented; DeepSpeed prints nothing then",
}
"""Keys of dsx's own sections that do something else than DeepSpeed's."""

_Tables = Sequence[tuple[str, str, Mapping[str, str]]]


@dataclass(frozen=True)
class Verdict:
    """The effect of one value.

    Attributes:
        path: dotted path, as the document spells it; empty for the document as a whole.
        value: the value in the document.
        word: one of the four words of the module's text.
        text: why, or what to do; may be empty.
        deepspeed: `same`, `better` or `differs` for a value that is used; empty otherwise.
    """

    path: str
    value: Any
    word: str
    text: str = ""
    deepspeed: str = ""


def verdicts(source: Any, *, world_size: int = 1) -> list[Verdict]:
    """One verdict for each value of a configuration, in its order; at the end the problems of the document as a whole.

    Raises:
        DsxConfigError: the document cannot be read.
    """
    document = read(source)
    try:
        load_config(source, world_size=world_size, template=True)
        problems: list[Problem] = []
    except DsxConfigError as error:
        problems = list(error.problems)
    model = root_model(sections_for(document.data))
    tables = (
        ("no effect", "", judged(model, "NO_EFFECT")),
        ("used", "same", judged(model, "OLD_NAMES")),
        ("no effect", "", MEANINGLESS),
        ("used", "differs", {**DIFFERS, **judged(model, "DIFFERS")}),
        ("used", "better", {**BETTER, **judged(model, "BETTER")}),
    )
    found, named = [], set()
    for path, value in leaves(document.data):
        if not path:
            continue  # an empty document
        refused = [p for p in problems if p.path and _meet(_documented(path), _documented(p.path))]
        named.update(id(problem) for problem in refused)
        found.append(_refused(path, value, refused) if refused else _accepted(path, value, tables))
    rest = [problem for problem in problems if id(problem) not in named]
    return found + [Verdict(problem.path, problem.got, "refused", _reason(problem)) for problem in rest]


def _documented(path: str) -> str:
    for second, first in SECOND_NAMES.items():
        if path == second or path.startswith(f"{second}."):
            return first + path[len(second) :]
    return path


def _meet(path: str, problem: str) -> bool:
    """Whether a problem at one path concerns the value at another: the paths are equal, or one contains the other."""
    return path == problem or path.startswith(f"{problem}.") or problem.startswith(f"{path}.")


def _refused(path: str, value: Any, problems: list[Problem]) -> Verdict:
    return Verdict(path, value, "refused", "; ".join(dict.fromkeys(map(_reason, problems))))


def _reason(problem: Problem) -> str:
    return f"{problem.message}. {problem.fix}" if problem.fix else problem.message


def _accepted(path: str, value: Any, tables: _Tables) -> Verdict:
    documented = _documented(path)
    if path == "$schema":
        return Verdict(path, value, "no effect", "it tells an editor where the schema is")
    if value == "auto" and documented not in MEANS_AUTO:
        return Verdict(path, value, "auto", "decided by dsx, or by the program that fills it in")
    for word, compared, table in tables:
        text = _lookup(table, documented)
        if text:
            return Verdict(path, value, word, text, compared)
    return Verdict(path, value, "used", deepspeed="same")


def _lookup(table: Mapping[str, str], path: str) -> str:
    """The text in a table for a path, or for the nearest section around it."""
    while path:
        if path in table:
            return table[path]
        path = path.rpartition(".")[0]
    return ""


def render(found: list[Verdict]) -> str:
    """The verdicts as a table of text, one line per value."""
    rows = [(v.path or "(document)", shorten(_json(v.value), 40), v.word, v.text) for v in found]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3].replace("\n", " ")]).rstrip()
        for row in rows
    ]
    return "".join(f"{line}\n" for line in lines)


def _json(value: Any) -> str:
    return json.dumps(value, default=str)
