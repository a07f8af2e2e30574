"""The exceptions of this package. Each message says what was given, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dsx_core import nearest

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
    found = nearest(name, names, limit=count)
    if not found:  # a pattern often resembles a part of a dotted name
        parts = {part: full for full in names for part in _parts(full, name.count(".") + 1)}
        found = [parts[part] for part in nearest(name, parts, limit=count)]
    return f"; near names: {', '.join(found)}" if found else ""


def _parts(name: str, length: int) -> Iterator[str]:
    """All runs of `length` consecutive components of a dotted name."""
    words = name.split(".")
    return (".".join(words[at : at + length]) for at in range(len(words) - length + 1))
