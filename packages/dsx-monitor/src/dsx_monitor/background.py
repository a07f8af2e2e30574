"""Queues with a thread behind each, so that training never waits for a file, a socket or a service.

Writers of files share one queue and thread, a lane; each writer that talks to a service has a lane of its own, so that
a service that hangs delays nothing but itself. What a lane promises: `put` returns at once; events arrive in order;
every writer is flushed when the queue runs empty, and once a second while it does not; the end of the process, by
return, exception or `sys.exit`, drains and closes it. A writer that raises is dropped with one warning and the others
go on. A process that is killed loses at most its last second. A forked child owns no thread and writes nothing.

At the end of the process (and in `flush`) a lane is waited for as long as it gets on. One whose writer has not come
back from a call for `patience` seconds is given up with a warning.

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
_PATIENCE = 10.0
_LOOK_SECONDS = 0.05


class _Lane:
    """Some writers, their queue and their thread, which starts with the first event (with `eager` at once)."""

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
        """Grows with every call of a writer that has come back, and shows that the lane gets on."""
        self.gave_up_at: int | None = None
        """`calls_done` when the last wait for this lane was given up."""
        if eager:
            self._start()

    def put(self, events: list[Event]) -> None:
        """Hand over events; never waits."""
        if not self.writers:
            return
        if self._thread is None:
            self._start()
        try:
            self._queue.put_nowait(events)
        except queue.Full:
            if not self._dropping:
                self._dropping = True
                logger.warning(
                    "monitor: %s does not keep up (%d calls queued); events are dropped", self.names, _CAPACITY
                )

    def flush_mark(self) -> threading.Event | None:
        """An event that is set once everything put so far is written out; None while the queue is full."""
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
        with suppress(queue.Full):  # a thread that finds something in its queue needs no waking
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
        """What has been put meanwhile; nothing if that was nothing for `timeout` seconds.

        After the first item the thread sleeps on, unless a flush or the end waits for it: waking up for every step, and
        taking the interpreter from the training thread to do so, would cost more than the writing.
        """
        try:
            items = [self._queue.get(timeout=timeout)]
        except queue.Empty:
            return []
        self._urgent.wait(_GATHER_SECONDS)
        self._urgent.clear()  # before the queue is emptied: a flush that sets it later is served in the next round
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
            logger.log(
                level, "monitor: %s failed and is switched off: %s: %s", writer.section, type(error).__name__, error
            )
            return False
        finally:
            self.calls_done += 1
        return True


class BackgroundWriters:
    """Feeds `writers` from threads that start with the first event.

    Args:
        writers: used by those threads only, from now on.
        patience: how long, in seconds, a writer may stay in one call before `flush` and `close` give it up.
    """

    def __init__(self, writers: Sequence[Writer], *, patience: float = _PATIENCE) -> None:
        remote = [writer for writer in writers if writer.remote]
        local = [writer for writer in writers if not writer.remote]
        # A service's own thread starts now: at the end of the interpreter, when its writer is closed, none can.
        self._lanes = [_Lane([writer], eager=True) for writer in remote]
        if local:
            self._lanes.append(_Lane(local, eager=False))
        self._order = [writer.section for writer in writers]
        self._patience = patience
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        # Processes made by multiprocessing (launchers, test ranks) leave without running atexit, but run finalizers.
        atexit.register(self.close)
        self._finalizer = multiprocessing.util.Finalize(None, self.close, exitpriority=100)

    @property
    def writers(self) -> tuple[Writer, ...]:
        """The writers still in use."""
        found = [writer for lane in self._lanes for writer in lane.writers]
        return tuple(sorted(found, key=lambda writer: self._order.index(writer.section)))

    def put(self, events: list[Event]) -> None:
        """Hand over events; never waits. Dropped after `close` and in forked children."""
        if self._closed or os.getpid() != self._pid:
            return
        for lane in self._lanes:
            lane.put(events)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything put so far is written out.

        Returns False if that took longer than `timeout` seconds, or a writer hangs.
        """
        if self._closed or os.getpid() != self._pid:
            return True
        limit = None if timeout is None else time.monotonic() + timeout
        lanes = [lane for lane in self._lanes if lane.gave_up_at != lane.calls_done]
        slow = self._wait({lane: lane.flush_mark() for lane in lanes}, limit)
        return not slow and len(lanes) == len(self._lanes)

    def close(self) -> None:
        """Write everything out, close the writers, end the threads. May be called twice."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._finalizer.cancel()
        self._wait({lane: lane.close() for lane in self._lanes}, None)

    def _wait(self, marks: dict[_Lane, threading.Event | None], limit: float | None) -> list[_Lane]:
        """Wait for all marks at once; returns the lanes that were given up (they have not got on for too long)."""
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
                    logger.warning(
                        "monitor: %s has not come back for %.0f s; its last events may be lost", lane.names, now - since
                    )
            if limit is not None and now >= limit:
                return [*slow, *waiting]
        return slow


def _batches(
    items: Sequence[list[Event] | threading.Event],
) -> Iterator[tuple[threading.Event | None, list[Event]]]:
    """Events put one after the other as one list, up to each mark of a flush."""
    events: list[Event] = []
    for item in items:
        if isinstance(item, threading.Event):
            yield item, events
            events = []
        else:
            events += item
    if events:
        yield None, events
