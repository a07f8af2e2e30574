"""Python stacks as they are shown: the innermost frame first, the user's own lines apart from those of libraries."""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import NamedTuple

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STDLIB = tuple(os.path.abspath(sysconfig.get_paths()[name]) + os.sep for name in ("stdlib", "platstdlib"))


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether the line is in the user's own code: not in an installed library, Python's own, or this package."""
        return not (
            f"{os.sep}site-packages{os.sep}" in self.file
            or self.file.startswith((_HERE, "<", *_STDLIB))
            or f"{os.sep}dist-packages{os.sep}" in self.file
        )

    def __str__(self) -> str:
        short = self.file.split(f"site-packages{os.sep}")[-1].removeprefix(os.getcwd() + os.sep)
        return f"{short}:{self.line} {self.function}"


def is_ours(file: str) -> bool:
    """Whether a file belongs to this package, whose lines no report shows."""
    return file.startswith(_HERE)


def users_first(stack: tuple[Frame, ...]) -> list[Frame]:
    """The user's lines, then those of libraries; both with the innermost first."""
    return [f for f in stack if f.is_users] + [f for f in stack if not f.is_users and not f.file.startswith("<")]


def where(stack: tuple[Frame, ...]) -> str:
    """The line to blame: the user's innermost one, or else the innermost one of a library."""
    ordered = users_first(stack)
    return str(ordered[0]) if ordered else "(no Python line)"


def current(skip: int = 1, most: int = 48) -> tuple[Frame, ...]:
    """The stack of the calling thread, without this package's frames."""
    frame, found = sys._getframe(skip), []
    while frame is not None and len(found) < most:
        code = frame.f_code
        if not is_ours(code.co_filename):
            found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)
