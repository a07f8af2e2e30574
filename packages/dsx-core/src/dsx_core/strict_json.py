"""Reads JSON from files that may be damaged or hostile. It refuses some texts that Python's parser accepts.

Refused are two values under one key (Python keeps the last), numbers that are not JSON (NaN), and nesting that is too
deep for the parser. The types of fields are checked: `True` is not a number here, and 4.0 is not a size.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["LARGEST", "parse", "shape", "size", "table"]

LARGEST = (1 << 63) - 1  # bytes or elements
MAX_DIMENSIONS = 64


def parse(text: str | bytes, *, nan: bool = False) -> Any:
    """The value of a JSON text. Raises ValueError.

    Args:
        nan: take NaN and infinities as Python writes them.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=None if nan else _refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def table(value: Any, what: str) -> dict[str, Any]:
    """Returns `value` if it is a JSON object. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{what}: expected an object, got {type(value).__name__}")
    return value


def size(value: Any, what: str) -> int:
    """Returns `value` if it is a number of bytes or elements. Raises ValueError."""
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ValueError(f"{what}: expected a whole number from 0 to {LARGEST}, got {_brief(value)}")
    return value


def shape(value: Any, what: str) -> tuple[int, ...]:
    """`value` as a shape, if it is a list of sizes. Raises ValueError."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise ValueError(f"{what}: expected a list of at most {MAX_DIMENSIONS} sizes, got {_brief(value)}")
    return tuple(size(item, what) for item in value)


def _brief(value: Any) -> str:
    """A number or a short text as it is, anything else by its type: the `repr` of a hostile value may be endless."""
    if isinstance(value, (str, bytes)):
        return repr(value[:40])
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 1 << 128):
        return repr(value)
    return type(value).__name__


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"two values for {twice!r:.40}")
    return found


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
