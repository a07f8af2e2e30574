"""A JSON reader for files written by people. It accepts comments and trailing commas, and knows the place of every key.

In addition to JSON it accepts ``//`` and ``#`` line comments, ``/* */`` comments, a comma after the last item, and keys
without quotes (``stage: 2``), as DeepSpeed's reader does. Unlike Python's reader it refuses a key that is given twice
in one object (the first value would be lost silently), ``NaN`` and ``Infinity``. It keeps the line and column of every
key, so that later messages can point into the file. A message quotes only a part of a long line.

Left out on purpose: text without quotes or in single quotes, hexadecimal numbers, lines without commas. Other tools do
not accept such files as JSON either. The first and the last are read on request (``hjson=True``), for files that were
written for DeepSpeed's reader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]
from typing import Any

from dsx_core import shorten

from ..errors import Problem

__all__ = ["JsonText", "JsonTextError", "parse"]

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_WORD = re.compile(r"[A-Za-z_][\w.-]*")
_BARE_KEY = re.compile(r"[A-Za-z_$][\w$-]*")
_CONSTANTS = {"true": True, "false": False, "null": None}
_LOOKALIKES = {"True": "true", "False": "false", "None": "null"}
_NOT_FINITE = ("Infinity", "inf", "NaN", "nan")
_MAX_DEPTH = 64
_MAX_DIGITS = 400
"""No finite float has more digits before its point; Python's own limit for reading an int is 4300."""
_EXCERPT_WIDTH = 100

Path = tuple[str | int, ...]


class JsonTextError(ValueError):
    """The text is not JSON; ``problem`` says where and why."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


@dataclass(frozen=True)
class JsonText:
    """The result of reading: the value, the offset of every key and item, and the text itself."""

    value: Any
    offsets: dict[Path, int] = field(repr=False)
    text: str = field(repr=False)

    def place(self, path: Path) -> str:
        """Return ``line L, column C`` of the key at ``path`` or of its nearest parent; empty if there is none."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.offsets:
                line, column = _line_and_column(self.text, self.offsets[path[:end]])
                return f"line {line}, column {column}"
        return ""


def parse(text: str, *, hjson: bool = False) -> JsonText:
    """Read JSON with comments and trailing commas.

    Args:
        text: the whole document.
        hjson: the end of a line stands for a comma, and text without quotes goes to the end of its line.

    Raises:
        JsonTextError: with line, column and an excerpt with a caret at the place.
    """
    return _Reader(text, hjson).read()


class _Reader:
    def __init__(self, text: str, hjson: bool = False) -> None:
        self.hjson = hjson
        self.text = text[1:] if text.startswith("\ufeff") else text
        self.at = 0
        self.offsets: dict[Path, int] = {}

    def read(self) -> JsonText:
        self._skip()
        if self.at == len(self.text):
            raise self._error("the document is empty", "a JSON object: { ... }")
        value = self._value(())
        self._skip()
        if self.at < len(self.text):
            raise self._error("there is text after the end of the document", "nothing here")
        return JsonText(value=value, offsets=self.offsets, text=self.text)

    # - the grammar

    def _value(self, path: Path) -> Any:
        if len(path) > _MAX_DEPTH:
            raise self._error(f"objects are nested deeper than {_MAX_DEPTH} levels", "a flatter document")
        char = self._peek()
        if char == "{":
            return self._object(path)
        if char == "[":
            return self._array(path)
        if char == '"':
            return self._string()
        match = _NUMBER.match(self.text, self.at)
        if match:
            return self._number(match)
        return self._word()

    def _object(self, path: Path) -> dict[str, Any]:
        start = self.at
        self.at += 1
        result: dict[str, Any] = {}
        while True:
            self._skip()
            if self._peek() == "}":
                self.at += 1
                return result
            key_at = self.at
            key = self._key(start)
            if key in result:
                first, _ = _line_and_column(self.text, self.offsets[(*path, key)])
                dotted = ".".join(map(str, (*path, shorten(key))))
                raise self._error(
                    f'the key "{shorten(key)}" is given twice',
                    f"one value (the first is in line {first})",
                    at=key_at,
                    kind="duplicate-key",
                    path=dotted,
                )
            self.offsets[(*path, key)] = key_at
            self._skip()
            if self._peek() != ":":
                raise self._error(f'there is no ":" after the key "{shorten(key)}"', '":" and the value')
            self.at += 1
            self._skip()
            result[key] = self._value((*path, key))
            self._comma("}", start)

    def _key(self, start: int) -> str:
        if self._peek() == '"':
            return self._string()
        bare = _BARE_KEY.match(self.text, self.at)
        if bare is None:
            raise self._error(*self._bad_key(start))
        self.at = bare.end()
        return bare.group()

    def _array(self, path: Path) -> list[Any]:
        start = self.at
        self.at += 1
        result: list[Any] = []
        while True:
            self._skip()
            if self._peek() == "]":
                self.at += 1
                return result
            self.offsets[(*path, len(result))] = self.at
            result.append(self._value((*path, len(result))))
            self._comma("]", start)

    def _comma(self, closing: str, start: int) -> None:
        end = self.at
        self._skip()
        if self._peek() == ",":
            self.at += 1
            return
        if self.hjson and "\n" in self.text[end : self.at]:
            return
        if self._peek() == closing:
            return
        line, _ = _line_and_column(self.text, start)
        opened = "{" if closing == "}" else "["
        if self.at == len(self.text):
            raise self._error(f'the "{opened}" of line {line} is never closed', f'"{closing}"')
        raise self._error("a comma is missing", f'"," or "{closing}" (of the "{opened}" in line {line})')

    def _string(self) -> str:
        try:
            value, self.at = scanstring(self.text, self.at + 1, True)
        except JSONDecodeError as error:
            raise self._error(f"this text cannot be read: {error.msg}", "text in double quotes", at=error.pos) from None
        return value

    def _number(self, match: re.Match[str]) -> int | float:
        end = match.end()
        if end < len(self.text) and (self.text[end].isalnum() or self.text[end] in "._"):
            raise self._error("this is not a JSON number", "a number such as 1, 0.5 or 5e8")
        if end - match.start() > _MAX_DIGITS:
            raise self._error(f"this number has {end - match.start()} digits", f"at most {_MAX_DIGITS} digits")
        self.at = end
        fraction, exponent = match.groups()
        if not fraction and not exponent:
            return int(match.group())
        value = float(match.group())
        if value in (float("inf"), float("-inf")):
            self.at = match.start()
            raise self._error("this number is too large", "a finite number")
        return value

    def _word(self) -> Any:
        if self.at == len(self.text):
            raise self._error("the document ends where a value should stand", "a value")
        match = _WORD.match(self.text, self.at)
        word = match.group() if match else self.text[self.at]
        if word in _CONSTANTS:
            self.at += len(word)
            return _CONSTANTS[word]
        if word in _NOT_FINITE or self.text.startswith("-Infinity", self.at):
            raise self._error(
                f"{word if match else '-Infinity'} is not a JSON number", "a finite number; null where it means never"
            )
        if self.hjson and match and word not in _LOOKALIKES:
            end = self.text.find("\n", self.at)
            start, self.at = self.at, len(self.text) if end < 0 else end
            return self.text[start : self.at].strip()
        if word in _LOOKALIKES:
            raise self._error(f"{word} is Python, not JSON", _LOOKALIKES[word])
        word = word if len(word) <= 40 else word[:37] + "..."
        if word == "'":
            raise self._error("text stands in single quotes", 'double quotes: "..."')
        raise self._error(f"{word!r} is not a JSON value", 'a number, "text", true, false, null, {...} or [...]')

    # - helpers

    def _skip(self) -> None:
        text = self.text
        while self.at < len(text):
            if text[self.at] in " \t\r\n":
                self.at += 1
            elif text.startswith(("//", "#"), self.at):
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif text.startswith("/*", self.at):
                end = text.find("*/", self.at + 2)
                if end < 0:
                    raise self._error("this comment is never closed", "*/")
                self.at = end + 2
            else:
                return

    def _peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def _bad_key(self, start: int) -> tuple[str, str]:
        if self.at == len(self.text):
            line, _ = _line_and_column(self.text, start)
            return f'the "{{" of line {line} is never closed', '"}"'
        if self._peek() == ",":
            return "there is a comma with nothing before it", "a key or nothing"
        return "there is no key here", '"key": value'

    def _error(
        self, message: str, expected: str, *, at: int | None = None, kind: str = "syntax", path: str = ""
    ) -> JsonTextError:
        offset = self.at if at is None else at
        line, column = _line_and_column(self.text, offset)
        return JsonTextError(
            Problem(
                kind=kind,
                path=path,
                message=message,
                expected=expected,
                where=f"line {line}, column {column}",
                excerpt=_excerpt(self.text, line, column),
                fix="remove one of the two" if kind == "duplicate-key" else "correct the text at the caret",
            )
        )


def _line_and_column(text: str, offset: int) -> tuple[int, int]:
    line = text.count("\n", 0, offset) + 1
    return line, offset - (text.rfind("\n", 0, offset) + 1) + 1


def _excerpt(text: str, line: int, column: int) -> str:
    lines = text.splitlines() or [""]
    # A file may be one long line, so only a part around the caret is shown.
    start = 0 if column <= _EXCERPT_WIDTH else column - 1 - _EXCERPT_WIDTH // 2
    shown = []
    for number in range(max(1, line - 1), line + 1):
        content = lines[number - 1].expandtabs(1) if number <= len(lines) else ""
        shown.append(f"    {number:>4} | {content[start : start + _EXCERPT_WIDTH]}")
    shown.append(f"    {'':>4} | {' ' * (column - 1 - start)}^")
    return "\n".join(shown)
