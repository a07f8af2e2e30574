"""Identifies the process that holds a folder, by process id, start time and machine, and tells whether it still runs.

The id alone is not enough: after a process has died, another one may get its id. Without /proc, only the id is
compared.
"""

from __future__ import annotations

import os
import platform
from typing import NamedTuple

__all__ = ["ProcessIdentity"]


class ProcessIdentity(NamedTuple):
    """A process on a machine."""

    pid: int
    started: str  # clock ticks since the machine started, or "" if the system does not tell
    machine: str

    @classmethod
    def current(cls) -> ProcessIdentity:
        """The calling process."""
        return cls(os.getpid(), _started(os.getpid()), _machine())

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity | None:
        """The identity from its `str()`, or None for any other text."""
        words = text.split()
        if len(words) != 3 or not words[0].isdigit():
            return None
        return cls(int(words[0]), words[1].removeprefix("@"), words[2])

    def __str__(self) -> str:
        return f"{self.pid} @{self.started} {self.machine}"

    def is_running(self) -> bool:
        """Whether the process runs. A process on another machine is assumed to run, since this machine cannot tell."""
        if self.machine != _machine():
            return True
        if self.started:
            return _started(self.pid) == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # it is another user's process
            return True
        return True


def _started(pid: int) -> str:
    """Start time of a running process; "" without /proc, or if the process has ended (also as a zombie)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the program's name, before the ")", may contain spaces
    except OSError:
        return ""
    return "" if len(fields) < 20 or fields[0] in ("Z", "X") else fields[19]


def _machine() -> str:
    """An identifier of this machine since its last boot, the same for all its processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return platform.node() or "unknown"
