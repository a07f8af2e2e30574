"""Reads a configuration from a dictionary, a JSON file, or base64 text of JSON (as launchers pass it).

The result is always a plain dictionary of JSON values, which is a copy of the caller's, and a function that gives the
place of a key in the file.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import DsxConfigError, Problem
from .jsonc import JsonTextError, Path, parse
from .model import Config

__all__ = ["Document", "read"]


@dataclass(frozen=True)
class Document:
    """A configuration as it was written.

    Attributes:
        data: the values; a fresh copy.
        name: ``dictionary``, ``base64 text`` or the file's path as given.
        place: key path -> ``line L, column C``; empty text without a file.
    """

    data: dict[str, Any]
    name: str
    place: Callable[[Path], str]


def read(source: Any, *, hjson: bool = False) -> Document:
    """Read a configuration.

    Args:
        source: mapping, path of a JSON file, base64 text of a JSON object, a `Document`, which is copied, or a loaded
            `Config`, of which the values that were written are read.
        hjson: see `jsonc.parse`; for files and text.

    Raises:
        DsxConfigError: the file is missing or unreadable, the text is not JSON, or the value is not an object.
    """
    if isinstance(source, Config):
        derived = source.batch.derived
        source = {key: value for key, value in source.to_dict().items() if key not in derived}
    if isinstance(source, Document):
        return replace(source, data=copy.deepcopy(source.data))
    if isinstance(source, Mapping):
        problems: list[Problem] = []
        data = _copy(source, (), problems)
        if problems:
            raise DsxConfigError(problems, source="dictionary")
        return Document(data, "dictionary", lambda path: "")
    if isinstance(source, (str, os.PathLike)):
        text, name = _text(source)
        return _from_text(text, name, hjson)
    raise DsxConfigError(
        [
            Problem(
                "source",
                "",
                "this is not a configuration",
                got=f"an object of type {type(source).__name__}",
                expected="a dictionary, the path of a JSON file, or base64 text of JSON",
                fix='pass config="dsx.json" or config={...} to dsx.initialize',
            )
        ],
        source=type(source).__name__,
    )


def _text(source: str | os.PathLike[str]) -> tuple[str, str]:
    name = os.fspath(source)
    if os.path.isfile(name):
        return _read_file(name), name
    decoded = _decode_base64(name) if isinstance(source, str) else None
    if decoded is not None:
        return decoded, "base64 text"
    looks_like_json = name.lstrip().startswith("{")
    fix = "give the path of an existing file; relative paths start at the working directory of the process"
    if looks_like_json:
        fix = "write the text to a file, pass json.loads(text), or encode it with base64"
    raise DsxConfigError(
        [
            Problem(
                "source",
                "",
                "there is a folder, not a file, at this path" if os.path.isdir(name) else "the file does not exist",
                got=name if len(name) <= 200 else name[:200] + " ...",
                expected="the path of a JSON file, or base64 text of a JSON object",
                fix=fix,
            )
        ],
        source=name if len(name) <= 80 else name[:80] + " ...",
    )


def _read_file(name: str) -> str:
    try:
        with open(name, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"byte {error.start} is not UTF-8"
        raise DsxConfigError(
            [
                Problem(
                    "source", "", f"the file cannot be read: {reason}", got=name, expected="a readable UTF-8 text file"
                )
            ],
            source=name,
        ) from error


def _decode_base64(text: str) -> str | None:
    """Return the decoded text if it is base64 and looks like a JSON object, otherwise None."""
    compact = "".join(text.split())
    padded = compact + "=" * (-len(compact) % 4)
    for altchars in (None, b"-_"):
        try:
            decoded = base64.b64decode(padded, altchars=altchars, validate=True).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError, ValueError):
            continue
        if decoded.lstrip("\ufeff \t\r\n").startswith(("{", "/", "#")):
            return decoded
    return None


def _from_text(text: str, name: str, hjson: bool) -> Document:
    try:
        parsed = parse(text, hjson=hjson)
    except JsonTextError as error:
        raise DsxConfigError([error.problem], source=name) from None
    if not isinstance(parsed.value, dict):
        got = json.dumps(parsed.value)
        problem = Problem(
            "type",
            "",
            "the document is not an object",
            got=got[:80],
            expected='{"key": value, ...}',
            where="line 1, column 1",
        )
        raise DsxConfigError([problem], source=name)
    return Document(parsed.value, name, parsed.place)


def _copy(value: Any, path: Path, problems: list[Problem]) -> Any:
    """Copy JSON values from the caller's mappings and sequences."""
    if isinstance(value, Mapping):
        copied = {}
        for key, item in value.items():
            if isinstance(key, str):
                copied[key] = _copy(item, (*path, key), problems)
            else:
                where = ".".join(map(str, path))
                problems.append(
                    Problem("type", where, "a key is not text", got=repr(key), expected="text keys, as JSON has them")
                )
        return copied
    if isinstance(value, (list, tuple)):
        return [_copy(item, (*path, index), problems) for index, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            key = ".".join(map(str, path))
            fix = "write null (None): no progress lines" if key == "steps_per_print" else ""
            problems.append(Problem("value", key, "a finite number is needed", got=str(value), fix=fix))
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    problems.append(
        Problem(
            "type",
            ".".join(map(str, path)),
            "this is not a JSON value",
            got=f"an object of type {type(value).__name__}",
            expected="a number, text, true, false, null, a list or an object",
        )
    )
    return None
