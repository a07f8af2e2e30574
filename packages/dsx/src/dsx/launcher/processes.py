"""Leaving no process behind: lives tied to the launcher's, orphans adopted, whatever remains killed.

Only the launcher's own descendants are ever touched; nothing is looked for by name.
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
    """From now on descendants whose parent died become children of this process (Linux), so that `kill_descendants`
    finds them.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def dying_with_parent(number: signal.Signals = signal.SIGTERM) -> Callable[[], None] | None:
    """A ``preexec_fn`` that makes the child receive ``number`` when this process dies; None where the kernel has no
    such thing.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # loaded here: after the fork as little as possible is done

    def request() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)

    return request


def lives(pid: int) -> bool:
    """Whether there is such a process and it has not ended: one that nobody has waited for yet does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may end at any moment, also between two questions
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
