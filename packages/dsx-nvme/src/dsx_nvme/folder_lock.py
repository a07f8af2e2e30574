"""A folder of one process at a time, taken with the kernel's lock on a file in it.

The lock goes with its holder. After a kill it lives for as long as the kernel still writes what the dead process had
begun, up to a second: then it is waited for, because those writes must not meet the ones of a new store. A file `owner`
names the holder, to tell this from a folder in use, which is refused at once.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time

from .errors import FolderInUseError
from .process_identity import ProcessIdentity

__all__ = ["OWNER", "FolderLock"]

OWNER = "owner"
PATIENCE = 10.0  # seconds; how long a folder is waited for whose process has died
POLL = 0.01


class FolderLock:
    """The lock of `folder`, on the open file `fd` in it."""

    def __init__(self, folder: str, fd: int) -> None:
        self._folder, self._fd, self._pid = folder, fd, os.getpid()
        self._path = os.path.join(folder, OWNER)

    def acquire(self) -> None:
        """Take the folder. Raises FolderInUseError when another process (or store) has it."""
        if sys.platform == "win32":
            return
        import fcntl  # not of every platform

        limit = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                owner = self._owner()
                running = owner is not None and owner.is_running()
                if not running and time.monotonic() < limit:
                    time.sleep(POLL)
                    continue
                who = f"process {owner.pid}" if owner is not None and running else "a child of a process that ended"
                raise FolderInUseError(
                    f"{self._folder} is in use by another TensorStore ({who}); give each process a folder of its own"
                ) from error
        self._name_owner()

    def release(self) -> None:
        """Give the folder back. A forked child does nothing: the lock is its parent's."""
        if sys.platform == "win32" or os.getpid() != self._pid:
            return
        import fcntl  # not of every platform

        # Closing the descriptor does not always do it: a ring may hold the file of a request it has just finished for a
        # moment longer, and a forked child holds it for good.
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _owner(self) -> ProcessIdentity | None:
        try:
            if not stat.S_ISREG(os.stat(self._path).st_mode):
                return None
            with open(self._path, encoding="ascii", errors="replace") as file:
                return ProcessIdentity.parse(file.read(1000))
        except OSError:
            return None

    def _name_owner(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, only its holder has no name
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            with open(self._path, "x", encoding="ascii") as file:
                file.write(str(ProcessIdentity.current()))
