"""Leaves no process behind: children die with the launcher, orphans are adopted, and remaining descendants are killed.

Only the launcher's own descendants are affected; no process is searched by name.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
from collections.abc import Callable

import psutil

log = logging.getLogger("dsx.launcher")

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on, descendants whose parent has died become children of this process (Linux), so that
    `kill_descendants` finds them.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def dying_with_parent(number: signal.Signals = signal.SIGTERM) -> Callable[[], None] | None:
    """A ``preexec_fn`` with which the child receives signal ``number`` when this process dies; None if the kernel does
    not support that.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # loaded before the fork, because little is safe between fork and exec

    def request() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)

    return request


def lives(pid: int) -> bool:
    """Whether the process exists and has not ended; a zombie has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may end at any moment, also between two calls
        return False


def kill_descendants(*, wait_s: float = 2.0) -> int:
    """SIGKILL every descendant of this process and wait for them. Returns how many there were."""
    living = [process for process in psutil.Process().children(recursive=True) if lives(process.pid)]
    for process in living:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(living, timeout=wait_s)
    if living:
        log.debug("ended %d process(es) the ranks had left behind", len(living))
    return len(living)
