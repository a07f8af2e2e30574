"""The receipt of an audit: what was compared, and the first fault with its evidence; as text, JSON and HTML."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsx_core import CodedError, replace_text

__all__ = ["KINDS", "Fault", "Receipt", "WrongStepError"]

KINDS: Mapping[str, str] = {
    "start": "the parameters before training differ between ranks, or from the plain model",
    "names": "the system trains other parameters than the plain model has, or parameters of other shapes",
    "tied weights": "two names of one parameter hold different values",
    "dtype": "a parameter, a buffer or an output has another dtype than was asked for",
    "precision": "values are right up to the rounding of a coarser dtype than was asked for",
    "random stream": "the forward pass draws other random numbers, or another number of them",
    "forward": "the forward pass computes something else, from the named module on",
    "other samples": "the loss is that of other samples",
    "loss scaled": "the loss is a multiple of what it should be",
    "scaled by the ranks": "a multiple or fraction by the number of ranks: a sum in place of a mean, or averaged twice",
    "scaled by accumulation": "a multiple or fraction by the number of micro-batches",
    "scaled by the loss scale": "the loss scale was not removed, or removed twice",
    "loss scale": "the loss scale did not follow its rule of growth and backoff",
    "scaled": "all values are one multiple of what they should be",
    "missing reduction": "samples of other ranks are not in the gradient",
    "lost or doubled micro-batch": "a micro-batch is not in the gradient, or counts more than once",
    "accumulation": "an update has another number of micro-batches than was asked for",
    "sample weights": "samples have other weights in the mean than was asked for",
    "missing gradient": "a gradient, or a part of it, is zero",
    "other tensor": "the values of another tensor, group or expert",
    "stale weights": "computed with, or left at, parameters of before an update",
    "clipped twice": "the clipping factor was applied more than once",
    "not clipped": "gradients were not clipped",
    "clipped by another norm": "gradients were clipped by a norm that is not the global one",
    "step skipped": "the optimizer made no update",
    "step doubled": "the optimizer made more than one update",
    "learning rate": "another learning rate, or one of another step",
    "wrong decay": "weight decay was applied to a wrong group, or not applied",
    "plain SGD": "the update is a multiple of the gradient: the optimizer's own rule did not run",
    "optimizer states": "the update is that of an optimizer without its history",
    "optimizer rule": "the optimizer computes another update from the same gradient",
    "ranks differ": "ranks hold different values of one tensor",
    "frozen changed": "a parameter changed that is not trained",
    "buffer": "a buffer has other values",
    "checkpoint": "a checkpoint does not bring back what was saved",
    "values": "other values, of no kind that is known",
}
"""The kinds of faults, and what each means."""


@dataclass(frozen=True)
class Fault:
    """The first thing that a system does wrong.

    Attributes:
        kind: one of `KINDS`.
        name: the tensor, or the name of the number.
        step: number of the update, from 1; 0: before training.
        rank: a rank on which it shows.
        evidence: at most five lines.
    """

    kind: str
    name: str
    step: int
    rank: int
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        head = f"step {self.step}, {self.name}: {self.kind} ({KINDS[self.kind]})"
        return "\n".join([head, *(f"  {line}" for line in self.evidence)])


@dataclass
class Receipt:
    """The outcome of an audit, the same on all ranks.

    Attributes:
        ranks: number of processes.
        system: the adapter's name.
        steps: updates that were compared completely.
        compared: values compared, by kind.
        closest: by kind, the largest error as a share of what is allowed.
        fault: the first fault; None: everything is equal.
        notes: what was not compared, and why.
    """

    ranks: int
    system: str
    steps: int = 0
    compared: dict[str, int] = field(default_factory=dict)
    closest: dict[str, float] = field(default_factory=dict)
    fault: Fault | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return self.fault is None

    def __str__(self) -> str:
        head = f"dsx-verify: {self.system} on {self.ranks} {'rank' if self.ranks == 1 else 'ranks'}"
        counts = ", ".join(f"{count} x {kind}" for kind, count in self.compared.items())
        if self.fault is not None:
            return f"{head}: wrong\n{self.fault}"
        notes = "".join(f"\n  not compared: {note}" for note in self.notes)
        return f"{head}: {self.steps} updates equal to plain torch ({counts}){notes}"

    def to_json(self) -> str:
        """The receipt as JSON."""
        return json.dumps({"format": 1, "ok": self.ok, **asdict(self)}, indent=1)

    def to_html(self) -> str:
        """The receipt as one page that loads nothing."""
        return _page(self)

    def write(self, path: str | Path) -> None:
        """Write the receipt: HTML if the name ends with `.html`, else JSON. For one rank to call."""
        path = Path(path)
        replace_text(path, self.to_html() if path.suffix == ".html" else self.to_json() + "\n")


class WrongStepError(CodedError, RuntimeError):
    """A training step does not compute what plain torch computes; `receipt` says what differs."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(str(receipt))
        self.receipt = receipt

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.receipt,)


_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;
color-scheme:light dark}
table{border-collapse:collapse}td,th{padding:.2rem .8rem;border-bottom:1px solid #8886;text-align:left}
pre{white-space:pre-wrap;border-left:4px solid #b3261e;padding-left:1rem}.good{color:#2e7d32}.bad{color:#b3261e}"""


def _page(receipt: Receipt) -> str:
    fault, name = receipt.fault, html.escape(receipt.system)
    if fault is None:
        verdict = f'<p class="good"><b>Equal to plain torch</b> in {receipt.steps} updates.</p>'
    else:
        lines = html.escape("\n".join(fault.evidence))
        verdict = (
            f'<p class="bad"><b>{html.escape(fault.kind)}</b>: {html.escape(KINDS[fault.kind])}</p>'
            f"<p>Step {fault.step}, {html.escape(fault.name)}, rank {fault.rank}</p><pre>{lines}</pre>"
        )
    rows = "".join(_row(receipt, kind, count) for kind, count in receipt.compared.items())
    notes = "".join(f"<li>not compared: {html.escape(note)}</li>" for note in receipt.notes)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>dsx-verify: {name}</title><style>{_STYLE}</style>'
        f"<h1>{name} on {receipt.ranks} ranks</h1>{verdict}<table><tr><th>compared</th><th>values</th>"
        f"<th>largest error, as a share of what is allowed</th></tr>{rows}</table><ul>{notes}</ul></html>\n"
    )


def _row(receipt: Receipt, kind: str, count: int) -> str:
    share: Any = receipt.closest.get(kind)
    told = "" if share is None else f"{share:.1%}"
    return f"<tr><td>{html.escape(kind)}</td><td>{count}</td><td>{told}</td></tr>"
