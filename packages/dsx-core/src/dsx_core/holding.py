"""Folders that are in use as long as a process lives that holds them: by the kernel's lock on a file in them.

A process id in a folder's name would say nothing in another PID namespace: a container that shares the host's temporary
folder would take all of the host's running jobs for dead ones.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .locks import lock_alone, unlock

__all__ = ["HOLD_NAME", "Hold", "free", "hold", "note_in", "remove_if_free"]

HOLD_NAME = ".in_use"
_TRIES, _PAUSE_S = 5, 0.01  # another process may look at the same folder, which takes its lock for a moment
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class Hold:
    """This process' part in holding a folder. It ends with `release`, or with the process."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def release(self) -> None:
        """Hold the folder no longer. A second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):  # a file system without locks
                unlock(fd)
            os.close(fd)


def hold(folder: Path, note: str = "") -> Hold:
    """Hold a folder, together with any other processes. On a file system without locks it is held for ever.

    Args:
        note: a text for those who find the folder left.

    Raises:
        OSError: the folder is not there, or cannot be written to.
    """
    path = folder / HOLD_NAME
    while True:
        fd = os.open(path, _FLAGS | os.O_CREAT, 0o600)
        with suppress(OSError):  # a file system without locks: then `free` finds no folder to be free
            fcntl.flock(fd, fcntl.LOCK_SH)
        try:
            same = os.path.samestat(os.fstat(fd), os.stat(path))
        except FileNotFoundError:
            same = False
        if same:
            if note:
                os.pwrite(fd, note.encode(errors="surrogateescape"), 0)
            return Hold(fd)
        os.close(fd)  # the folder was removed between the two calls; opening it again says so


def note_in(folder: Path) -> str:
    """The note of those who hold or held a folder; empty where there is none."""
    try:
        return (folder / HOLD_NAME).read_bytes().decode(errors="surrogateescape")
    except OSError:
        return ""


@contextmanager
def free(folder: Path) -> Iterator[bool]:
    """Whether a folder was held, and nobody holds it now. Inside the context nobody begins to."""
    try:
        fd = os.open(folder / HOLD_NAME, _FLAGS)
    except OSError:  # it was never held, or is another user's, or is gone
        yield False
        return
    try:
        yield _lock_soon(fd)
    finally:
        os.close(fd)


def _lock_soon(fd: int) -> bool:
    for _ in range(_TRIES):
        try:
            if lock_alone(fd):
                return True
        except OSError:  # a file system without locks
            return False
        time.sleep(_PAUSE_S)
    return False


def remove_if_free(folder: Path) -> bool:
    """Remove a folder that was held and is not any more. Returns whether it was."""
    with free(folder) as is_free:
        if is_free:
            shutil.rmtree(folder, ignore_errors=True)
        return is_free
