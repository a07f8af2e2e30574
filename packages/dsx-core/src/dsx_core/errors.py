"""Errors with a stable code, and the nearest known name for a mistyped one.

A code (`DSX` and three digits) stands at the end of the text of an error or a warning. Under it
docs/reference/errors.md says what happened and what to do. A code never changes its meaning, so people can search for
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["CodedError", "Finding", "edits", "first_few", "nearest", "shorten", "with_code"]

_LONGEST_NAME = 100
"""No known name is nearly as long. A longer name is not compared, because that takes time in proportion to its length
times that of every known name.
"""


def with_code(text: str, code: str) -> str:
    """The text of an error or a warning with its stable code. A text that has the code already is left alone: it may
    come from an error of another rank.
    """
    return text if f"[{code}]" in text else f"{text} [{code}] docs: dsx explain {code}"


class CodedError(Exception):
    """Base of errors with a stable code.

    `code`: the code with which the text ends; "" for errors without one. A class has it, or the call that raises gives
    it.
    """

    code: str = ""

    def __init__(self, *args: object, code: str = "", **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if code:
            self.code = code

    def __str__(self) -> str:
        text = super().__str__()
        return with_code(text, self.code) if self.code else text


@dataclass(frozen=True)
class Finding:
    """Something wrong with values of a configuration that are valid one by one. The package that owns the keys finds
    it; who loads the configuration tells the user.

    Attributes:
        key: dotted path of the key.
        reason: what is wrong, in one sentence.
        got, expected: the value, and the one that works.
        fix: what to do.
        kind: "value", "conflict" (with another key) or "missing".
    """

    key: str
    reason: str
    got: str
    expected: str
    fix: str
    kind: str = "value"


def shorten(text: str, width: int = 120) -> str:
    """Return `text`, or its beginning and its length if it is longer than `width`, so that messages stay readable."""
    return text if len(text) <= width else f"{text[: width - 20]}... ({len(text)} characters)"


def first_few(items: Iterable[object], most: int = 5, *, between: str = ", ") -> str:
    """Things as one text: all of a few, else the first ones and how many more there are."""
    texts = [str(item) for item in items]
    return between.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def nearest(name: str, known: Iterable[str], *, limit: int = 3) -> list[str]:
    """Return at most `limit` known names that are nearest to `name`, in alphabetical order; empty if none is near.

    The first of four rules that finds something holds:

    1. At most one single-character edit (insert, delete, replace, swap neighbours) makes one of the other.
    2. The given name is the first part of a known one (`H100` of `H100-SXM`).
    3. The fewest edits, up to a third of the name.
    4. A known name contains the given one or is contained in it (`prefetch_bucket_size` in
       `stage3_prefetch_bucket_size`).

    All names that are equally near are returned, because one guess alone could mislead.
    """
    if len(name) > _LONGEST_NAME:
        return []
    names = sorted(set(known))
    lowered = name.lower()
    tolerated = max(2, len(name) // 3) if len(name) > 2 else 1
    ranked = sorted((edits(lowered, other.lower()), other) for other in names)
    begun = [other for other in names if re.match(re.escape(lowered) + r"[\W_]", other.lower())]
    if begun and ranked[0][0] > 1:
        return begun[:limit]
    if ranked and ranked[0][0] <= tolerated:
        best = ranked[0][0]
        return [other for distance, other in ranked if distance == best][:limit]
    if len(name) < 4:
        return []
    contained = [other for other in names if lowered in other.lower() or (other.lower() in lowered and len(other) > 3)]
    return sorted(contained, key=lambda other: (abs(len(other) - len(name)), other))[:limit]


def edits(left: str, right: str) -> int:
    """Return the number of single-character edits between two words (optimal string alignment distance)."""
    before_last: list[int] = []
    last = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        row = [i]
        for j, b in enumerate(right, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, before_last[j - 2] + 1)
            row.append(cost)
        before_last, last = last, row
    return last[-1]
