"""Records that the hang explainer keeps of a group and of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["DEFAULT_LIMIT", "GroupLog", "Waiting"]

DEFAULT_LIMIT = 540.0  # of groups that do not tell their time limit


@dataclass
class GroupLog:
    """The calls that this process has issued in one group."""

    name: str
    limit: float = DEFAULT_LIMIT  # seconds a call may wait before it is explained
    issued: int = 0
    op: str = "nothing"
    message: int | None = None

    @property
    def what(self) -> str:
        """The last call."""
        return _words(self.op, self.message)


@dataclass
class Waiting:
    """A call that a thread of this process waits for, or that a device works on."""

    log: GroupLog
    number: int  # of the call, in its group
    op: str
    message: int | None  # bytes, where the call tells
    label: str
    thread: int
    since: float
    limit: float  # seconds
    abort: Any = None  # makes the group's calls fail with a text, where the group can
    on_device: bool = False
    is_done: Callable[[], bool] | None = None  # of a call that is followed
    told: int = 0  # 1: the notice was given, 2: the last report
    failed: str = ""

    @property
    def what(self) -> str:
        """The call."""
        return _words(self.op, self.message)


def _words(op: str, message: int | None) -> str:
    return op if message is None else f"{op} of {message} bytes"
