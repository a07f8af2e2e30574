"""Lets one process at a time use a folder, with the kernel's lock on a file in it.

The lock ends with the process that holds it. After a kill it lasts as long as the kernel still finishes writes of the
dead process, up to a second. Then the new store waits for it, because those writes must not mix with its own. A file
`owner` names the holder. So a folder whose process has died is told apart from a folder in use, which is refused at
once.
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
PATIENCE = 10.0  # seconds to wait for a folder whose process has died
POLL = 0.01


class FolderLock:
    """The lock of `folder`, on the open file `fd` in it."""

    def __init__(self, folder: str, fd: int) -> None:
        self._folder, self._fd, self._pid = folder, fd, os.getpid()
        self._path = os.path.join(folder, OWNER)

    def acquire(self) -> None:
        """Take the folder. Raises FolderInUseError if another process (or store) has it."""
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
        """Release the folder. In a forked child this does nothing, because the lock belongs to its parent."""
        if sys.platform == "win32" or os.getpid() != self._pid:
            return
        import fcntl  # not of every platform

        # Closing the descriptor is not always enough: an io_uring may hold the file for a moment after its last
        # request, and a forked child holds it until it ends.
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
        with contextlib.suppress(OSError):  # on a full disk the lock still works, but its holder is not named
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            with open(self._path, "x", encoding="ascii") as file:
                file.write(str(ProcessIdentity.current()))
