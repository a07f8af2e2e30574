"""The lock of the job that saves in a folder of checkpoints: the file `.saving`, whose text names that job.

While a job holds the lock, no other job uses `.tmp-` and `.old-` folders, so that it can remove old ones of any tag. If
two jobs save in the same folder at the same time, the error of the second one names the first.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsx_core.locks import lock_alone, unlock

from .errors import CheckpointError
from .folder import clear_leftovers

logger = logging.getLogger("dsx.checkpoint")

_LOCK_NAME = ".saving"


@contextmanager
def saving(root: Path, tag: str) -> Iterator[None]:
    """Inside the context this process saves in `root`, and no other process may. Leftovers of killed saves are removed
    first.

    Raises:
        CheckpointError: another process, which it names, is saving there.
    """
    root.mkdir(parents=True, exist_ok=True)
    fd = _lock(root / _LOCK_NAME, tag)
    try:
        clear_leftovers(root, None if fd is not None else tag)
        yield
    finally:
        if fd is not None:
            _give_up(root / _LOCK_NAME, fd)


def _lock(path: Path, tag: str) -> int | None:
    """A descriptor that holds the lock; None if the file system has no locks."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            if _take(fd, path):
                _sign(fd, f"process {os.getpid()} on {socket.gethostname()}, tag {tag}")
                return fd
            os.close(fd)
        except BaseException as error:
            os.close(fd)
            if getattr(error, "errno", None) not in (errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL):
                raise
            logger.debug("%s: this file system has no locks (%s)", path, error)
            return None


def _take(fd: int, path: Path) -> bool:
    """Lock the file; False if its earlier holder has removed it, so that the locked file has no name any more."""
    if not lock_alone(fd):
        owner = os.pread(fd, 500, 0).decode(errors="replace").strip()
        raise CheckpointError(
            f"{path.parent}: another job is saving here right now ({owner or 'it has not said who it is yet'}); "
            "give each job a folder of its own, or they replace each other's 'latest'"
        )
    return path.exists() and os.path.samestat(os.fstat(fd), os.stat(path))


def _give_up(path: Path, fd: int) -> None:
    try:
        path.unlink(missing_ok=True)  # before the lock is released: see `_lock`
    except OSError as error:  # what was saved is there, and the next job can lock the file that stays
        logger.warning("%s: cannot be removed (%s)", path, error)
    finally:
        unlock(fd)
        os.close(fd)


def _sign(fd: int, text: str) -> None:
    """Write into the lock's file who holds it. On a full disk the lock works without this text."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(errors="backslashreplace"), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        logger.debug("the lock of a checkpoint folder has no text: %s", error)
