"""Queues with a thread behind each, so that training never waits for a file, a socket or a service.

A *lane* is a queue with its thread. The writers of files share one lane. Each writer that talks to a service has its
own lane, so that a service that hangs delays no other writer. A lane promises:

* `put` returns at once, and events arrive in order;
* every writer is flushed when the queue runs empty, and once a second while it does not;
* the end of the process (return, exception or `sys.exit`) drains the queue and closes the writers;
* a writer that raises is dropped with one warning, and the others go on;
* a process that is killed loses at most its last second;
* a forked child has no thread and writes nothing.

At the end of the process (and in `flush`) a lane is waited for as long as it makes progress. If a writer has not
returned from a call for `patience` seconds, its lane is given up with a warning.

Left out: spilling to disk. If a writer hangs and the queue is full, events are dropped, with one warning.
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

from dsx_core import with_code

from .errors import EVENTS_LOST, SWITCHED_OFF
from .events import Event
from .writers.base import Writer

__all__ = ["BackgroundWriters"]

logger = logging.getLogger("dsx_monitor")

_CAPACITY = 16384  # calls of `put`
_IDLE_SECONDS = 0.5
_FLUSH_SECONDS = 1.0
_GATHER_SECONDS = 0.2
_PATIENCE = 10.0
_LOOK_SECONDS = 0.05


class _Lane:
    """Some writers with their queue and their thread. The thread starts with the first event, or at once with
    `eager`.
    """

    def __init__(self, writers: Sequence[Writer], *, eager: bool) -> None:
        self.writers = list(writers)
        self._queue: queue.Queue[list[Event] | threading.Event] = queue.Queue(_CAPACITY)
        self._thread: threading.Thread | None = None
        self._urgent = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._dropping = False
        self.closed = threading.Event()
        self.calls_done = 0
        """The number of calls that writers have finished. It grows while the lane makes progress."""
        self.gave_up_at: int | None = None
        """`calls_done` when the last wait for this lane was given up."""
        if eager:
            self._start()

    def put(self, events: list[Event]) -> None:
        """Queue events; never waits."""
        if not self.writers:
            return
        if self._thread is None:
            self._start()
        try:
            self._queue.put_nowait(events)
        except queue.Full:
            if not self._dropping:
                self._dropping = True
                text = with_code("monitor: %s does not keep up (%d calls queued); events are dropped", EVENTS_LOST)
                logger.warning(text, self.names, _CAPACITY)

    def flush_mark(self) -> threading.Event | None:
        """An event that is set when everything queued so far is written out; None while the queue is full."""
        mark = threading.Event()
        if self._thread is None or not self._thread.is_alive():
            mark.set()
            return mark
        try:
            self._queue.put_nowait(mark)
        except queue.Full:
            return None
        self._urgent.set()
        return mark

    def close(self) -> threading.Event:
        """Begin to drain the queue, then to close the writers; returns the event that is set afterwards."""
        self._closing.set()
        if self._thread is None or not self._thread.is_alive():
            self._each("close")
            self.closed.set()
            return self.closed
        self._urgent.set()
        with suppress(queue.Full):  # a full queue wakes the thread anyway
            self._queue.put_nowait(threading.Event())
        return self.closed

    @property
    def names(self) -> str:
        """The sections of its writers, for warnings."""
        return ", ".join(writer.section for writer in self.writers)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dsx-monitor", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        dirty, due = False, 0.0
        while True:
            items = self._gathered(_IDLE_SECONDS if dirty else None)
            for mark, events in _batches(items):
                if events:
                    self._each("write", events)
                    dirty = True
                if mark is not None:
                    self._each("flush")
                    dirty = False
                    mark.set()
            if self._closing.is_set() and self._queue.empty():
                self._each("close")
                self.closed.set()
                return
            if dirty and (not items or time.monotonic() >= due):
                self._each("flush")
                dirty, due = False, time.monotonic() + _FLUSH_SECONDS

    def _gathered(self, timeout: float | None) -> list[list[Event] | threading.Event]:
        """The items that were queued since the last call; an empty list if none came for `timeout` seconds.

        After the first item the thread sleeps again for a while, unless a flush or the end waits for it. Waking up for
        every step would take the interpreter lock from the training thread, and cost more than the writing.
        """
        try:
            items = [self._queue.get(timeout=timeout)]
        except queue.Empty:
            return []
        self._urgent.wait(_GATHER_SECONDS)
        self._urgent.clear()  # before the queue is emptied, so that a flush that sets it later gets the next round
        with suppress(queue.Empty):
            while True:
                items.append(self._queue.get_nowait())
        return items

    def _each(self, method: str, *arguments: object) -> None:
        for writer in list(self.writers):
            if not self._guard(writer, getattr(writer, method), *arguments) and method != "close":
                self.writers.remove(writer)
                self._guard(writer, writer.close, quiet=True)

    def _guard(self, writer: Writer, call: object, *arguments: object, quiet: bool = False) -> bool:
        try:
            call(*arguments)  # type: ignore[operator]
        except (Exception, SystemExit) as error:  # noqa: BLE001  no failure of a third-party writer may end training
            level = logging.DEBUG if quiet else logging.WARNING
            text = with_code("monitor: %s failed and is switched off: %s: %s", SWITCHED_OFF)
            logger.log(level, text, writer.section, type(error).__name__, error)
            return False
        finally:
            self.calls_done += 1
        return True


class BackgroundWriters:
    """Feeds `writers` from threads that start with the first event.

    Args:
        writers: the writers; from now on only those threads may use them.
        patience: how many seconds a writer may stay in one call before `flush` and `close` give it up.
    """

    def __init__(self, writers: Sequence[Writer], *, patience: float = _PATIENCE) -> None:
        remote = [writer for writer in writers if writer.remote]
        local = [writer for writer in writers if not writer.remote]
        # The thread of a service starts now: a writer that is closed at interpreter exit could not start one.
        self._lanes = [_Lane([writer], eager=True) for writer in remote]
        if local:
            self._lanes.append(_Lane(local, eager=False))
        self._order = [writer.section for writer in writers]
        self._patience = patience
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._told_closed = False
        # Processes made by multiprocessing (launchers, test ranks) do not run atexit, but they run finalizers.
        atexit.register(self.close)
        self._finalizer = multiprocessing.util.Finalize(None, self.close, exitpriority=100)

    @property
    def writers(self) -> tuple[Writer, ...]:
        """The writers still in use."""
        found = [writer for lane in self._lanes for writer in lane.writers]
        return tuple(sorted(found, key=lambda writer: self._order.index(writer.section)))

    def put(self, events: list[Event]) -> None:
        """Queue events; never waits. Events are dropped in forked children, and after `close`, which warns once."""
        if os.getpid() != self._pid:
            return
        if self._closed:
            if not self._told_closed:
                self._told_closed = True
                logger.warning("monitor: got events after close(), which are lost; close it after the last of them")
            return
        for lane in self._lanes:
            lane.put(events)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued so far is written out.

        Returns False if that took longer than `timeout` seconds, or a writer hangs.
        """
        if self._closed or os.getpid() != self._pid:
            return True
        limit = None if timeout is None else time.monotonic() + timeout
        lanes = [lane for lane in self._lanes if lane.gave_up_at != lane.calls_done]
        slow = self._wait({lane: lane.flush_mark() for lane in lanes}, limit)
        return not slow and len(lanes) == len(self._lanes)

    def close(self) -> None:
        """Write everything out, close the writers and end the threads. A second call does nothing."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._finalizer.cancel()
        self._wait({lane: lane.close() for lane in self._lanes}, None)

    def _wait(self, marks: dict[_Lane, threading.Event | None], limit: float | None) -> list[_Lane]:
        """Wait for all marks together; returns the lanes that were given up, because they made no progress."""
        now = time.monotonic()
        seen = {lane: (lane.calls_done, now) for lane in marks}
        waiting, slow = dict(marks), []
        while waiting:
            lane, mark = next(iter(waiting.items()))
            if mark is None:
                time.sleep(_LOOK_SECONDS)
            else:
                mark.wait(_LOOK_SECONDS)
            now = time.monotonic()
            for lane, mark in list(waiting.items()):
                if mark is None:
                    waiting[lane] = lane.flush_mark()
                elif mark.is_set():
                    del waiting[lane]
                    continue
                calls, since = seen[lane]
                if lane.calls_done != calls:
                    seen[lane] = (lane.calls_done, now)
                elif now - since > self._patience:
                    del waiting[lane]
                    slow.append(lane)
                    lane.gave_up_at = lane.calls_done
                    text = "monitor: %s has not come back for %.0f s; its last events may be lost"
                    logger.warning(with_code(text, EVENTS_LOST), lane.names, now - since)
            if limit is not None and now >= limit:
                return [*slow, *waiting]
        return slow


def _batches(
    items: Sequence[list[Event] | threading.Event],
) -> Iterator[tuple[threading.Event | None, list[Event]]]:
    """Join events that follow each other into one list, up to each mark of a flush."""
    events: list[Event] = []
    for item in items:
        if isinstance(item, threading.Event):
            yield item, events
            events = []
        else:
            events += item
    if events:
        yield None, events
