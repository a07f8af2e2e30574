"""Asynchronous calls whose handle was dropped without a wait: a thread waits for them in place of the caller.

Such a call is legal, and common for sends. Its memory must be held until the call is done, and freed then. Some calls
end only if a thread waits for them. So the finaliser of a handle puts it into a queue, and a thread polls the handles
of the queue until their calls are done.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from .hang import GRACE

logger = logging.getLogger(__name__)

_SOON, _SELDOM = 0.0002, 0.02  # seconds between two looks: at first, and after a while


class Droppable(Protocol):
    """A handle as it is needed here.

    Attributes:
        pollable: whether asking it costs nothing; else a thread of its own waits inside (gloo's sends and receives),
            and one is asked at a time.
    """

    pollable: bool

    def is_completed(self) -> bool:
        """True once the result is in place, or the call has failed."""
        ...

    def exception(self) -> BaseException | None:
        """The error that made it fail."""
        ...


class Dropped:
    """The dropped handles of this process. No caller is left to raise a failure to: it is logged."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self.thread: threading.Thread | None = None
        """The thread that waits; None before `start`."""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Have the thread run. Called when a handle is handed out: a finaliser must not start threads. Under a limit of
        memory or processes that forbids it dropped handles are held until a later call finds room for the thread.
        """
        if self.thread is None:
            with self._lock:
                if self.thread is None:
                    arguments = (self._queue,)
                    thread = threading.Thread(target=_run, args=arguments, daemon=True, name="dsx-comm-dropped")
                    try:
                        thread.start()
                    except RuntimeError as error:  # the call is under way, and its caller may wait for it
                        logger.warning("no thread for handles that are dropped: %s (ulimit -v or -u?)", error)
                        return
                    self.thread = thread

    def take(self, handle: Droppable) -> None:
        """See to `handle` (called by its finaliser: it lives on in the queue)."""
        self._queue.put(handle)

    def finish(self) -> None:
        """End the thread once its calls are done, or let it be after a moment: a peer that never answers keeps it."""
        thread, self.thread = self.thread, None
        if thread is not None and thread is not threading.current_thread():
            self._queue.put(None)
            self._queue = SimpleQueue()
            thread.join(GRACE)

    def forked(self) -> None:
        """This is a child of the process: it has not the thread, and no part in its parent's calls."""
        self.__init__()


def _run(queue: SimpleQueue[Any]) -> None:
    pending: list[Droppable] = []
    pause, ending = _SOON, False
    while not ending or pending:
        try:
            handle = queue.get(timeout=pause) if pending else queue.get()
        except Empty:
            pause = min(2 * pause, _SELDOM)
        else:
            ending = ending or handle is None
            pause = _SOON
            if handle is not None:
                pending.append(handle)
        handle = None  # or the last one would be held until the next comes
        pending = _unfinished(pending)


def _unfinished(handles: list[Droppable]) -> list[Droppable]:
    left: list[Droppable] = []
    waiting = False  # for one that is not pollable
    for handle in handles:
        if waiting and not handle.pollable:
            left.append(handle)
            continue
        try:
            done, error = handle.is_completed(), handle.exception()
        except Exception as raised:  # noqa: BLE001  (whatever the arithmetic at the end of a call may raise)
            done, error = True, raised
        if error is not None:
            logger.warning("an asynchronous call whose handle was dropped has failed: %s", error)
        if not done:
            waiting = waiting or not handle.pollable
            left.append(handle)
    return left


DROPPED = Dropped()
atexit.register(DROPPED.finish)
os.register_at_fork(after_in_child=DROPPED.forked)
