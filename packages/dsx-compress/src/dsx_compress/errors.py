"""The exceptions of this package. Each message says what was given, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["CompressionConfigError", "CompressionDataError", "CompressionError", "near"]


class CompressionError(ValueError):
    """The model, an argument or the order of the calls is wrong."""


class CompressionConfigError(CompressionError):
    """The configuration is wrong. The text has the path of the key."""


class CompressionDataError(CompressionError):
    """A tensor has values that cannot be compressed (NaN or infinity), or a file is damaged."""


def near(name: str, known: Iterable[str], count: int = 3) -> str:
    """Return `; near names: ...`, or nothing where no known name resembles `name`."""
    names = sorted(set(known))
    found = difflib.get_close_matches(name, names, n=count, cutoff=0.5)
    if not found:  # a pattern often resembles one part of a dotted name
        parts = {part: full for full in names for part in full.split(".")}
        found = [parts[part] for part in difflib.get_close_matches(name, parts, n=count, cutoff=0.5)]
    return f"; near names: {', '.join(found)}" if found else ""
