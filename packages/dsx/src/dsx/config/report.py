"""Reports about a loaded configuration: where each value came from, and which keys were not used.

``Explanation`` is a table (path, value, origin, note); origin is ``file`` (or ``dictionary``), ``default``, ``derived``
(computed from other keys) or ``auto`` (left to dsx). ``UsageTracker`` records which configured sections were used, so
that a configured feature that no code uses is reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .notes import ALWAYS_SHOWN

__all__ = ["Explanation", "Row", "UsageTracker", "leaves"]


@dataclass(frozen=True)
class Row:
    """One value of the configuration in effect."""

    path: str
    value: Any
    origin: str
    note: str = ""

    def text(self) -> str:
        """Return the value as JSON."""
        return json.dumps(self.value)


@dataclass(frozen=True)
class Explanation:
    """Every value in effect, in the order of the documentation."""

    source: str
    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, path: str) -> Row:
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(path)

    def chosen(self) -> tuple[Row, ...]:
        """Return the rows that are not defaults, and the defaults that change training although the user set
        nothing.
        """
        return tuple(row for row in self.rows if row.origin != "default" or row.path in ALWAYS_SHOWN)

    def render(self, *, everything: bool = True) -> str:
        """Return the table as text, one line per value.

        Args:
            everything: also show plain defaults.
        """
        rows = self.rows if everything else self.chosen()
        widths = [max([len(head), *(len(cell(row)) for row in rows)]) for head, cell in _COLUMNS]
        lines = ["  ".join(head.ljust(width) for (head, _), width in zip(_COLUMNS, widths)).rstrip()]
        lines += [
            "  ".join(cell(row).ljust(width) for (_, cell), width in zip(_COLUMNS, widths)).rstrip() for row in rows
        ]
        return "\n".join([f"configuration: {self.source}", *lines])

    def __str__(self) -> str:
        return self.render()


_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("key", lambda row: row.path),
    ("value", lambda row: row.text()),
    ("from", lambda row: row.origin),
    ("note", lambda row: row.note),
)


class UsageTracker:
    """Records which of the configured top-level keys were used.

    Args:
        configured: keys that the configuration sets and that ask for a feature.
    """

    def __init__(self, configured: Iterable[str]) -> None:
        self.configured = tuple(configured)
        self._used: set[str] = set()

    def mark(self, *keys: str) -> None:
        """Record that these keys are used."""
        self._used.update(keys)

    def unused(self) -> list[str]:
        """Return the configured keys that were never marked, in the order of the configuration."""
        return [key for key in self.configured if key not in self._used]


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of everything in nested dictionaries; lists and empty dictionaries are values."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
