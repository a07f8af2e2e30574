"""The limit of open files: raised as far as the system allows, and compared with what the job's sockets need.

The usual limit of 1,024 ends a job of a thousand ranks in the middle of its start, with an error of gloo's about one of
its sockets. A process may raise it to the hard limit by itself, so this one does. If that is too little, it says so
before there is a group.
"""

from __future__ import annotations

import contextlib
import os
import sys

from .doubling import rounds
from .errors import CommError
from .on_demand import MANY_RANKS

__all__ = ["allow_many", "check_open_files", "files_needed"]

_MOST = 1 << 20  # some systems say 10^9, and some programs go through all numbers up to the limit
_SPARE = 64  # for the script itself: data, checkpoints, libraries
_GROUPS = 4  # over the host: the default one, and those for agreement, checkpoints and preemption


def allow_many() -> int:
    """Raise the limit of open files to the hard limit, and return what it is now; -1: there is none that counts."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return -1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited:
        return -1
    wanted = _MOST if hard == unlimited else min(hard, _MOST)
    if wanted > soft:
        with contextlib.suppress(ValueError, OSError):  # refused: the old limit is compared
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return soft


def files_needed(world_size: int, backend: str, *, serves: bool = False) -> int:
    """The files that a rank of a job has open beside those of before, at most.

    Args:
        backend: of the default group ("cpu:gloo,cuda:nccl").
        serves: this process has the job's store in it, to which each rank connects twice.
    """
    near = 4 + 2 * len(list(rounds(world_size)))  # a listening socket, two that the loop has, those of neighbours
    names = {part.rpartition(":")[2] for part in backend.split(",")}
    mesh = world_size - 1 if "gloo" in names or world_size < MANY_RANKS else 0
    return mesh + _GROUPS * near + (2 * world_size if serves else 2) + _SPARE


def check_open_files(limit: int, world_size: int, backend: str, *, serves: bool = False) -> None:
    """Compare the limit of open files (-1: none) with what this rank needs.

    Raises:
        CommError: it is too low. Names the limit, what is needed and how to raise it.
    """
    if limit < 0 or world_size == 1:
        return
    needed = files_needed(world_size, backend, serves=serves) + _open_now()
    if needed <= limit:
        return
    names = {part.rpartition(":")[2] for part in backend.split(",")}
    way = ""
    if "gloo" in names and world_size >= MANY_RANKS:
        way = (
            f"; or do not name gloo (got {backend!r}): without a name the ranks' hosts connect on demand, to"
            f" {2 * len(list(rounds(world_size)))} ranks each instead of {world_size - 1}"
        )
    raise CommError(
        f"open files: got a hard limit of {limit}, expected at least {needed} for one of {world_size} ranks. Raise it"
        " where the ranks are started (`ulimit -Hn`, `nofile` in /etc/security/limits.conf, LimitNOFILE= of the"
        f" service, --ulimit nofile of the container){way}",
        code="DSX209",
    )


def _open_now() -> int:
    """Open files of this process, where the system tells."""
    return len(os.listdir("/proc/self/fd")) if sys.platform.startswith("linux") else 0
