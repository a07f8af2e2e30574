"""Handles of asynchronous operations: `wait()` and `is_completed()`, whatever lies beneath.

A `Handle` is a list of transfers (torch Works, or handles) plus an optional finish: arithmetic that turns what arrived
into the result (a sum in rank order, a division). The finish runs once, in the thread that waits.

Operations of two phases (a composed all-reduce: scatter, then gather) issue their second phase when a caller waits. Two
ranks that wait for two such operations in opposite order would wait for each other; so waiting for one first advances
all that were issued before it, in every group. `Queue` keeps that order.

The works of the shared-memory transport (`shm/work.py`) are no handles: torch's process groups accept subclasses of its
own `Work` only. A `Handle` over one of them adds what callers see on every backend.

A handle may be dropped without a wait. Where the operation ends only if a thread waits (a finish, a second phase,
gloo's sends and receives), `dropped.py` sees to it. Others the backend carries out by itself; those on the host are
looked at all the same, so that a failure is logged. On a device the backend tells of it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from .calls import WAITS, waiting
from .dropped import DROPPED
from .errors import CollectiveTimeoutError
from .hang import WATCH
from .hang_notes import Waiting


class Handle:
    """An operation under way.

    `pollable=False` says that the transfers only notice their completion inside `wait()` (gloo's sends and receives):
    asking `is_completed()` then starts a thread that waits for them.
    """

    def __init__(
        self,
        transfers: Sequence[Any] = (),
        finish: Callable[[], Any] | None = None,
        *,
        pollable: bool = True,
        note: Waiting | None = None,
    ) -> None:
        self.transfers = transfers
        self.note = note
        self.compare: Callable[[], None] | None = None
        self._finish = finish
        self.pollable = pollable
        self.needs_a_thread = finish is not None or not pollable
        """Whether the operation ends only if it is waited for. Handles among the transfers have their own answer."""
        self._lock = threading.RLock()
        self._done = False
        self._error: BaseException | None = None
        self._poller: threading.Thread | None = None
        self._arrived: threading.Event | None = None  # of the poller
        self._callback_lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._has_arrived = False

    def __del__(self) -> None:
        if not self._done and (self.needs_a_thread or self._fails_unseen()) and not sys.is_finalizing():
            DROPPED.take(self)

    def _fails_unseen(self) -> bool:
        """Whether nobody would hear of a failure once the handle is dropped."""
        return self.note is not None and not self.note.on_device and DROPPED.thread is not None

    def hand_out(self, note: Waiting | None = None, compare: Callable[[], None] | None = None) -> None:
        """A caller gets this handle and may drop it: have a thread ready that waits for it then.

        `note` is the hang explainer's of the call, `compare` asks whether the other ranks call the same.
        """
        self.note, self.compare = note, compare
        if DROPPED.thread is None and (self.needs_a_thread or (note is not None and not note.on_device)):
            DROPPED.start()
        for transfer in self.transfers:
            if isinstance(transfer, Handle):
                transfer.hand_out()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in place (on a device: until the current stream will see it). Raises what failed.

        `timeout` is a limit for this wait, on a device too: there the host then waits for the device, which it does not
        otherwise. On a device the operation goes on after a wait that was too short, and may be waited for again.
        """
        if self._done and self._error is None:
            return True
        with self._lock:
            if not self._done:
                if timeout is not None and self.note is not None and self.note.on_device:
                    self._await_device(self.note, timeout)
                    timeout = None
                self._complete(timeout)
            if self._error is not None:
                raise self._error
        return True

    def synchronize(self) -> None:
        """Like `wait`; on the host there is nothing more to wait for."""
        self.wait()

    def _complete(self, timeout: timedelta | None) -> None:
        """Receive, so that a hang in it is explained and a rank that called something else is named; then finish."""
        note = self.note
        watched = WATCH.current() if note is None else note  # without a note: part of a call that is watched, if any is
        limit = timeout if watched is None else WATCH.resume(watched, self.transfers, timeout)
        receive = self._receive if self.compare is None else self._compare_and_receive
        try:
            try:
                waiting(receive, limit) if WAITS.active else receive(limit)
            except RuntimeError as error:
                explained = error if note is None else WATCH.verdict(note, error)
                raise explained from (None if explained is error else error)
            finally:
                if note is not None:
                    WATCH.leave(note)
            self._arrive()
            if self._finish is not None:
                with torch.no_grad():
                    self._finish()
        except BaseException as error:
            self._error = error
            self._arrive()
            raise
        finally:
            self._done, self._finish, self.transfers = True, None, ()

    def is_completed(self) -> bool:
        """True if the result is in place; never waits for another rank."""
        if self._done:
            return True
        if self.pollable:
            ready = True
            for work in self.transfers:  # a loop: a generator's every step is a call
                if not work.is_completed():
                    ready = False
                    break
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
        """The error, if the call failed."""
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
        elif not self.pollable:
            self._start_poller()
        elif first:
            notify(list(self.transfers), self._arrive)

    def _arrive(self) -> None:
        # Not under self._lock: a thread inside wait() holds it until the backend's callbacks, of which this is one, are
        # done.
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
                arguments = (list(self.transfers), self._arrived)
                self._poller = threading.Thread(target=self._poll, args=arguments, daemon=True, name="dsx-comm-poll")
                self._poller.start()
        finally:
            self._lock.release()

    def _poll(self, transfers: list[Any], arrived: threading.Event) -> None:
        try:
            for work in transfers:
                work.wait()
        except BaseException as error:  # noqa: BLE001  (raised in the thread that waits)
            self._error = error
        finally:
            arrived.set()
        self._arrive()

    def _compare_and_receive(self, timeout: timedelta | None) -> None:
        if self.compare is not None:
            self.compare()
        self._receive(timeout)

    def _receive(self, timeout: timedelta | None) -> None:
        if self._arrived is not None:
            if not self._arrived.wait(None if timeout is None else timeout.total_seconds()):
                raise CollectiveTimeoutError(f"the operation did not complete within {timeout}")
            if self._error is not None:
                raise self._error
            return
        for work in self.transfers:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)

    def _await_device(self, note: Waiting, timeout: timedelta) -> None:
        """Look at the device's works, more and more rarely, until they are done or the time is over."""
        seconds, pause = timeout.total_seconds(), 1e-5
        until = time.monotonic() + seconds
        while not all(work.is_completed() for work in self.transfers):
            if time.monotonic() >= until:
                raise CollectiveTimeoutError(
                    f"{note.what} (call #{note.number} of group {note.log.name}) was not done on the device within "
                    f"{seconds:g} s; it goes on, and may be waited for again"
                )
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)


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
        self._done = self._has_arrived = True


class TwoPhase(Handle):
    """An operation whose second phase is issued once the first has arrived."""

    def __init__(self, first: Handle, second: Callable[[], Handle]) -> None:
        super().__init__()
        self.needs_a_thread = True
        self._phases = _Phases(first, second)
        QUEUE.append(self._phases)

    def _receive(self, timeout: timedelta | None) -> None:
        """Wait for both phases; those issued earlier are advanced first. A limit holds for the second phase."""
        QUEUE.advance_until(self._phases)
        if self._phases.rest is None:
            raise self._phases.error or RuntimeError("the first phase of this operation was never completed")
        self._phases.rest.wait(timeout)

    def on_arrival(self, callback: Callable[[], None]) -> None:
        """Like that of every handle; the second phase only begins when a caller waits or asks."""
        self._phases.on_arrival(callback)

    def is_completed(self) -> bool:
        """True if the result is in place; never waits for another rank."""
        if not self._done and QUEUE.poke_until(self._phases):
            rest = self._phases.rest
            if rest is not None and rest.is_completed():
                self.wait()
        return self._done


class _Phases:
    """The queue's record of an operation of two phases. It does not hold the handle, so a dropped handle is noticed."""

    def __init__(self, first: Handle, second: Callable[[], Handle]) -> None:
        self.first, self._second = first, second
        self.rest: Handle | None = None
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def advance(self) -> None:
        """Wait for the first phase and issue the second."""
        try:
            self.first.wait()
            rest = self._second()
        except BaseException as error:
            self.error = error
            raise
        with self._lock:
            self.rest = rest
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            rest.on_arrival(callback)

    def on_arrival(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the second phase has arrived."""
        with self._lock:
            rest = self.rest
            if rest is None:
                self._callbacks.append(callback)
        if rest is not None:
            rest.on_arrival(callback)


class Queue:
    """Two-phase operations whose second phase is not issued yet, in the order of issue."""

    def __init__(self) -> None:
        self._items: deque[_Phases] = deque()
        self._lock = threading.RLock()

    def forked(self) -> None:
        """This is a child of the process: it has no part in its parent's operations."""
        self.__init__()

    def append(self, phases: _Phases) -> None:
        """Note a new one."""
        with self._lock:
            self._items.append(phases)

    def advance_until(self, phases: _Phases) -> None:
        """Advance all up to and including `phases`, waiting for their first phases."""
        with self._lock:
            while phases in self._items:
                self._items.popleft().advance()

    def poke_until(self, phases: _Phases) -> bool:
        """Advance those whose first phase has arrived, in order; True if `phases` is past it. Does not wait."""
        with self._lock:
            while phases in self._items and self._items[0].first.is_completed():
                self._items.popleft().advance()
            return phases not in self._items


QUEUE = Queue()
os.register_at_fork(after_in_child=QUEUE.forked)
