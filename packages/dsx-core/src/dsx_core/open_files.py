"""The limit of open files of a process, which it may raise by itself as far as the system allows.

The usual limit of 1,024 ends a job of a thousand ranks or hosts in the middle of its start, with an error about one of
its sockets or pipes. Whoever needs more raises the limit before, and says so where that is not enough.
"""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["HOW_TO_RAISE", "allow_many", "open_now"]

HOW_TO_RAISE = (
    "(`ulimit -Hn`, `nofile` in /etc/security/limits.conf, LimitNOFILE= of the service, --ulimit nofile of the"
    " container)"
)
_MOST = 1 << 20  # some systems say 10^9, and some programs go through all numbers up to the limit


def allow_many(enough: int = _MOST) -> int:
    """Raise the limit of open files towards the hard limit, and return what it is now; -1: there is none that counts.

    Args:
        enough: no more than this is asked for. A higher limit stays.
    """
    try:
        import resource
    except ImportError:  # not a POSIX system
        return -1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited:
        return -1
    wanted = min(enough, _MOST) if hard == unlimited else min(hard, enough, _MOST)
    if wanted > soft:
        with contextlib.suppress(ValueError, OSError):  # refused: the caller compares the old limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return soft


def open_now() -> int:
    """Open files of this process, where the system tells; else 0."""
    return len(os.listdir("/proc/self/fd")) if sys.platform.startswith("linux") else 0
