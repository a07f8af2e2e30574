"""Handles of asynchronous operations: `wait()` and `is_completed()`, whatever lies beneath.

A `Handle` is a list of transfers (torch Works) plus an optional finish: arithmetic that turns what arrived into the
result (a sum in rank order, a division). The finish runs once, in the thread that waits. A handle must be waited for:
without it the result is not there.

Operations of two phases (a composed all-reduce: scatter, then gather) issue their second phase when somebody waits. Two
ranks that wait for two such operations in opposite order would wait for each other; so waiting for one first advances
all that were issued before it, in every group. `Queue` keeps that order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from .calls import waiting
from .hang import WATCH, Waiting


class Handle:
    """An operation under way.

    `pollable=False` says that the transfers only notice their completion inside `wait()` (gloo's sends and receives):
    asking `is_completed()` then starts a thread that waits for them.
    """

    def __init__(
        self, transfers: Sequence[Any] = (), finish: Callable[[], Any] | None = None, *, pollable: bool = True
    ) -> None:
        self._transfers = list(transfers)
        self._finish = finish
        self._pollable = pollable
        self._lock = threading.RLock()
        self._done = False
        self._error: BaseException | None = None
        self._poller: threading.Thread | None = None
        self._arrived: threading.Event | None = None  # of the poller
        self._callback_lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._has_arrived = False
        self.note: Waiting | None = None  # of the hang explainer
        self.compare: Callable[[], None] | None = None  # do the others call the same?
        _UNWAITED.add(self)  # a transfer's buffers must outlive a dropped handle

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in place (CUDA: until the current stream will see it). Raises what failed."""
        with self._lock:
            if not self._done:
                try:
                    waiting(partial(self._receive_watched, timeout))
                    self._arrive()
                    if self._finish is not None:
                        with torch.no_grad():
                            self._finish()
                except BaseException as error:
                    self._error = error
                    self._arrive()
                    raise
                finally:
                    self._done, self._finish, self._transfers = True, None, []
                    _UNWAITED.discard(self)
            if self._error is not None:
                raise self._error
            return True

    def is_completed(self) -> bool:
        """True if the result is in place; never waits for another rank."""
        if self._done:
            return True
        if self._pollable:
            ready = all(work.is_completed() for work in self._transfers)
        else:
            self._start_poller()
            ready = self._done or (self._arrived is not None and self._arrived.is_set())
        if ready:
            self.wait()
        return ready

    def is_success(self) -> bool:
        """True if it is done and nothing failed."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """What failed, if something did."""
        return self._error

    def on_arrival(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, from any thread, when all transfers have arrived; before or while the finish runs."""
        with self._callback_lock:
            waiting = not self._has_arrived
            if waiting:
                self._callbacks.append(callback)
            first = len(self._callbacks) == 1
        if not waiting:
            callback()
        elif not self._pollable:
            self._start_poller()
        elif first:
            notify(list(self._transfers), self._arrive)

    def _arrive(self) -> None:
        # not under self._lock: a thread inside wait() holds it until the backend's callbacks, of which this is one, are done
        with self._callback_lock:
            self._has_arrived = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _start_poller(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread is waiting and will tell
        try:
            if self._poller is None and not self._done:
                self._arrived = threading.Event()
                arguments = (list(self._transfers), self._arrived)
                self._poller = threading.Thread(target=self._poll, args=arguments, daemon=True, name="dsx-comm-poll")
                self._poller.start()
        finally:
            self._lock.release()

    def _poll(self, transfers: list[Any], arrived: threading.Event) -> None:
        try:
            for work in transfers:
                work.wait()
        except BaseException as error:  # noqa: BLE001  (handed to whoever waits)
            self._error = error
        finally:
            arrived.set()
        self._arrive()

    def _receive_watched(self, timeout: timedelta | None) -> None:
        patience = WATCH.patience(self.note)
        if timeout is None and patience is not None:
            timeout = timedelta(seconds=patience)
        self._explained(partial(self._receive, timeout))

    def _explained(self, receive: Callable[[], None]) -> None:
        """Receive, so that a hang in it is explained and a rank that called something else is named."""
        note = self.note
        if note is None:
            return receive()
        WATCH.resume(note)
        try:
            if self.compare is not None:
                self.compare()
            receive()
        except RuntimeError as error:
            explained = WATCH.verdict(note, error)
            raise explained from (None if explained is error else error)
        finally:
            WATCH.leave(note)

    def _receive(self, timeout: timedelta | None) -> None:
        if self._arrived is not None:
            if not self._arrived.wait(None if timeout is None else timeout.total_seconds()):
                raise TimeoutError(f"the operation did not complete within {timeout}")
            if self._error is not None:
                raise self._error
            return
        for work in self._transfers:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)


def notify(works: Sequence[Any], callback: Callable[[], None]) -> None:
    """Call `callback` once when all works (handles, or torch Works by their futures) have arrived.

    A torch Work whose backend has no futures counts as arrived at once.
    """
    lock, left = threading.Lock(), [len(works)]

    def arrived(_: Any = None) -> None:
        with lock:
            left[0] -= 1
            last = left[0] == 0
        if last:
            callback()

    if not works:
        callback()
    for work in works:
        if isinstance(work, Handle):
            work.on_arrival(arrived)
            continue
        try:
            future = work.get_future()
        except RuntimeError:
            arrived()
        else:
            future.then(arrived)


class Done(Handle):
    """An operation that was complete when it was issued (one rank, no elements)."""

    def __init__(self) -> None:
        super().__init__()
        self.wait()


class TwoPhase(Handle):
    """An operation whose second phase is issued by `advance` once the first has arrived."""

    def __init__(self, first: Handle, second: Callable[[], Handle]) -> None:
        super().__init__()
        _UNWAITED.discard(self)  # its phases are in there
        self._first, self._second = first, second
        self._rest: Handle | None = None
        QUEUE.append(self)

    def advance(self) -> None:
        """Wait for the first phase and issue the second."""
        try:
            self._first.wait()
            self._rest = self._second()
            with self._callback_lock:
                callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                self._rest.on_arrival(callback)
        except BaseException as error:
            self._error = error
            raise

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for both phases; those issued earlier are advanced first. `timeout` holds for the second phase."""
        if not self._done:
            self._explained(partial(self._both, timeout))
            self._done = True
            self._arrive()
        return True

    def _both(self, timeout: timedelta | None) -> None:
        QUEUE.advance_until(self)
        if self._rest is None:
            raise self._error or RuntimeError("the first phase of this operation was never completed")
        try:
            self._rest.wait(timeout)
        except BaseException as error:
            self._error = error
            raise

    def on_arrival(self, callback: Callable[[], None]) -> None:
        """As for every handle; the second phase only begins when somebody waits or asks."""
        with self._callback_lock:
            if self._rest is None:
                self._callbacks.append(callback)
                return
        self._rest.on_arrival(callback)

    def is_completed(self) -> bool:
        """True if the result is in place; never waits for another rank."""
        if not self._done and QUEUE.poke_until(self) and self._rest is not None and self._rest.is_completed():
            self.wait()
        return self._done


class Queue:
    """Two-phase operations whose second phase is not issued yet, in the order of issue."""

    def __init__(self) -> None:
        self._items: deque[TwoPhase] = deque()
        self._lock = threading.RLock()

    def append(self, handle: TwoPhase) -> None:
        """Note a new one."""
        with self._lock:
            self._items.append(handle)

    def advance_until(self, handle: TwoPhase) -> None:
        """Advance all up to and including `handle`, waiting for their first phases."""
        with self._lock:
            while handle in self._items:
                self._items.popleft().advance()

    def poke_until(self, handle: TwoPhase) -> bool:
        """Advance those whose first phase has arrived, in order; True if `handle` is past it. Does not wait."""
        with self._lock:
            while handle in self._items and self._items[0]._first.is_completed():
                self._items.popleft().advance()
            return handle not in self._items


QUEUE = Queue()
_UNWAITED: set[Handle] = set()
