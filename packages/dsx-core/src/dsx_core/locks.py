"""Locks of the kernel on open files: one descriptor has a file for itself. A lock ends with its processes."""

from __future__ import annotations

__all__ = ["lock_alone", "unlock"]


def lock_alone(fd: int) -> bool:
    """Lock an open file for this descriptor alone, until `unlock` or the end of all processes that have the descriptor.

    Returns whether it could; otherwise another descriptor has the lock. Raises OSError where files cannot be locked.
    """
    import fcntl  # not of every platform

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Release the lock of an open file.

    Closing the descriptor is not always enough: an io_uring may hold the file for a moment after its last request, and
    a child that was forked meanwhile holds it until it ends.
    """
    import fcntl  # not of every platform

    fcntl.flock(fd, fcntl.LOCK_UN)
