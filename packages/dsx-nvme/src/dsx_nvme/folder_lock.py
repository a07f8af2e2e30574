"""The lock of a store's folder, with the kernel's lock on a file in it, and the name of the process that has it.

The lock ends with the process that holds it, in whatever way that ends. So a folder whose process has died is free, and
nobody has to guess from a process id, which means another process in a container. A file `owner` names the holder, by
process id, start time and machine. It serves the message of an error, never the decision.

After a kill the lock lasts as long as the kernel still finishes writes of the dead process, up to a second. A new
holder waits for that, because those writes must not mix with its own. A folder in use is refused at once.
"""

from __future__ import annotations

import contextlib
import os
import platform
import stat
import sys
import time
from typing import NamedTuple

from dsx_core.locks import lock_alone, unlock

from .errors import FolderInUseError

__all__ = ["OWNER", "FolderLock", "ProcessIdentity"]

OWNER = "owner"
PATIENCE = 10.0  # seconds to wait for a folder whose process has died
POLL = 0.01


class ProcessIdentity(NamedTuple):
    """A process on a machine.

    The id alone is not enough: after a process has died, another one may get its id. Without /proc, only the id is
    compared.
    """

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


class FolderLock:
    """The lock of a TensorStore's `folder`, on the open file `fd` in it."""

    def __init__(self, folder: str, fd: int) -> None:
        self._folder, self._fd, self._pid = folder, fd, os.getpid()
        self._path = os.path.join(folder, OWNER)

    def acquire(self) -> None:
        """Take the folder. Raises FolderInUseError if another process (or another object of this one) has it."""
        if sys.platform == "win32":
            return
        limit = time.monotonic() + PATIENCE
        while not lock_alone(self._fd):
            owner = self._owner()
            running = owner is not None and owner.is_running()
            if not running and time.monotonic() < limit:
                time.sleep(POLL)
                continue
            who = f"process {owner.pid}" if owner is not None and running else "a child of a process that ended"
            raise FolderInUseError(
                f"{self._folder} is in use by another TensorStore ({who}); give each process a folder of its own"
            )
        self._name_owner()

    def release(self) -> None:
        """Release the folder. In a forked child this does nothing, because the lock belongs to its parent."""
        if sys.platform == "win32" or os.getpid() != self._pid:
            return
        unlock(self._fd)

    def _owner(self) -> ProcessIdentity | None:
        try:
            if not stat.S_ISREG(os.stat(self._path).st_mode):
                return None
            with open(self._path, encoding="ascii", errors="replace") as file:
                return ProcessIdentity.parse(file.read(1000))
        except OSError:
            return None

    def _name_owner(self) -> None:
        with contextlib.suppress(OSError):  # on a full disk the lock still works, but its holder is not named
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            with open(self._path, "x", encoding="ascii") as file:
                file.write(str(ProcessIdentity.current()))


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
