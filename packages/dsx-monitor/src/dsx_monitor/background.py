"""A queue with one thread behind it, so that training never waits for a file, a socket or a service.

What it promises: `put` returns at once; events arrive in order; every writer is flushed when the queue runs empty, and once a
second while it does not; the end of the process, by return, exception or `sys.exit`, drains and closes it; a writer that raises is dropped with one
warning and the others go on. A process that is killed loses at most its last second. A forked child owns no
thread and writes nothing.

Left out: spilling to disk. A queue that is full because a writer hangs drops events, and says so once.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from .events import Event
from .writers.base import Writer

__all__ = ["BackgroundWriters"]

logger = logging.getLogger("dsx_monitor")

_CAPACITY = 16384  # calls of `put`
_IDLE_SECONDS = 0.5
_FLUSH_SECONDS = 1.0
_GATHER_SECONDS = 0.2


class _Flush:
    """A marker in the queue; `done` is set when everything before it has been written and flushed."""

    def __init__(self, *, close: bool = False) -> None:
        self.close = close
        self.done = threading.Event()


class BackgroundWriters:
    """Feeds `writers` from a thread that starts with the first event.

    Args:
        writers: used by that thread only, from now on.
        exit_timeout: how long `close` waits, in seconds, before it gives up on a writer that hangs.
    """

    def __init__(self, writers: Sequence[Writer], *, exit_timeout: float = 120.0) -> None:
        self._writers = list(writers)
        self._timeout = exit_timeout
        self._queue: queue.Queue[list[Event] | _Flush] = queue.Queue(_CAPACITY)
        self._thread: threading.Thread | None = None
        self._urgent = threading.Event()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = self._dropping = False
        # Processes made by multiprocessing (launchers, test ranks) leave without running atexit, but run finalizers.
        atexit.register(self.close)
        self._finalizer = multiprocessing.util.Finalize(None, self.close, exitpriority=100)

    @property
    def writers(self) -> tuple[Writer, ...]:
        """The writers still in use."""
        return tuple(self._writers)

    def put(self, events: list[Event]) -> None:
        """Hand over events; never waits. Dropped after `close` and in forked children."""
        if self._closed or os.getpid() != self._pid or not self._writers:
            return
        if self._thread is None:
            self._start()
        try:
            self._queue.put_nowait(events)
        except queue.Full:
            if not self._dropping:
                self._dropping = True
                logger.warning("monitor: a writer does not keep up (%d calls queued); events are dropped", _CAPACITY)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything put so far is written out; False if that took longer than `timeout` seconds."""
        return self._mark(_Flush(), timeout)

    def close(self) -> None:
        """Write everything out, close the writers, end the thread. May be called twice."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._finalizer.cancel()
        if self._thread is None:
            for writer in self._writers:
                self._guard(writer, writer.close)
        elif not self._mark(_Flush(close=True), self._timeout):
            logger.warning("monitor: a writer did not finish within %.0f s; its last events may be lost", self._timeout)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dsx-monitor", daemon=True)
                self._thread.start()

    def _mark(self, mark: _Flush, timeout: float | None) -> bool:
        if self._thread is None or not self._thread.is_alive() or os.getpid() != self._pid:
            return True
        self._urgent.set()
        try:
            self._queue.put(mark, timeout=timeout)
        except queue.Full:
            return False
        self._urgent.set()
        return mark.done.wait(timeout)

    def _run(self) -> None:
        dirty, due = False, 0.0
        while True:
            items = self._gathered()
            for mark, events in _batches(items):
                if events:
                    self._each("write", events)
                    dirty = True
                if mark is not None:
                    self._each("close" if mark.close else "flush")
                    dirty = False
                    mark.done.set()
                    if mark.close:
                        return
            if dirty and (not items or time.monotonic() >= due):
                self._each("flush")
                dirty, due = False, time.monotonic() + _FLUSH_SECONDS

    def _gathered(self) -> list[list[Event] | _Flush]:
        """What has been put meanwhile; nothing if that was nothing for a while.

        After the first item the thread sleeps on, unless somebody waits for it: waking up for every step, and taking the
        interpreter from the training thread to do so, would cost more than the writing.
        """
        try:
            items = [self._queue.get(timeout=_IDLE_SECONDS)]
        except queue.Empty:
            return []
        self._urgent.wait(_GATHER_SECONDS)
        self._urgent.clear()  # before the queue is emptied: who sets it later is served in the next round
        with suppress(queue.Empty):
            while True:
                items.append(self._queue.get_nowait())
        return items

    def _each(self, method: str, *arguments: object) -> None:
        for writer in list(self._writers):
            if not self._guard(writer, getattr(writer, method), *arguments) and method != "close":
                self._writers.remove(writer)
                self._guard(writer, writer.close, quiet=True)

    def _guard(self, writer: Writer, call: object, *arguments: object, quiet: bool = False) -> bool:
        try:
            call(*arguments)  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001  any failure of a third-party writer must leave training alone
            level = logging.DEBUG if quiet else logging.WARNING
            logger.log(
                level, "monitor: %s failed and is switched off: %s: %s", writer.section, type(error).__name__, error
            )
            return False
        return True


def _batches(items: Sequence[list[Event] | _Flush]) -> Iterator[tuple[_Flush | None, list[Event]]]:
    """Events put one after the other as one list, up to each marker."""
    events: list[Event] = []
    for item in items:
        if isinstance(item, _Flush):
            yield item, events
            events = []
        else:
            events += item
    if events:
        yield None, events
