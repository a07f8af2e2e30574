"""Handles of operations on the shared-memory transport, as torch's Work.

A synchronous call is complete when it returns and shares one handle (`DONE`). An asynchronous one keeps its tensors
alive, may have a finish (copying a packed result back), and offers a future, which a thread completes in order of
issue.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..dropped import DROPPED
from ..errors import CollectiveTimeoutError, CommAbortedError, CommError, HangError, MismatchError, PeerLostError
from ..hang import WATCH
from ..hang_notes import Waiting
from . import native

_NAMES = {
    "PeerLost": PeerLostError,
    "WaitTimeout": CollectiveTimeoutError,
    "Mismatch": MismatchError,
    "Aborted": CommAbortedError,
    "Hang": HangError,
    "Forked": CommError,
}


def translated(error: BaseException, gone: Callable[[], list[int]]) -> BaseException:
    """The compiled module's error as this package's; any other as it is. `gone` gives the global ranks whose process
    has ended.

    A rank that waits sees the nearest rank that ended. That one may have ended because of another, which need not be a
    member of the group: so all are named.
    """
    if type(error).__module__ != native.module().__name__:
        return error
    kind, text = _NAMES[type(error).__name__], str(error)
    if kind is PeerLostError and len(ranks := gone()) > 1:
        text += f"; ended by now: rank(s) {', '.join(map(str, ranks))}"
    return kind(text)


class DoneWork(dist.Work):
    """An operation that was complete when its call returned."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self._value = value

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> Any:
        """None."""
        return None

    def result(self) -> Any:
        """The tensors, where the caller is known to ask for them."""
        return self._value or []

    def get_future(self) -> Any:
        """A completed future."""
        future: Any = torch.futures.Future()
        future.set_result(self._value)
        return future

    def synchronize(self) -> None:
        """Nothing to do."""


DONE = DoneWork()


class ShmWork(dist.Work):
    """An asynchronous operation: `pending` is the compiled module's handle, `value` what a future yields.

    `kept` holds the memory that the operation uses until it is over, `gone`: see `translated`.
    """

    pollable = True

    def __init__(
        self,
        pending: Any,
        kept: Any,
        value: Any,
        finish: Callable[[], Any] | None,
        timeout: float,
        note: Waiting,
        futures: Futures,
        gone: Callable[[], list[int]],
    ) -> None:
        super().__init__()
        self._pending, self._kept, self._value, self._finish = pending, kept, value, finish
        self._timeout, self._note, self._futures, self._gone = timeout, note, futures, gone
        self._lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None
        self._future: Any = None

    def __del__(self) -> None:
        if not self._done and not sys.is_finalizing():
            DROPPED.take(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the result is in place. `timeout` is for sends and receives; collectives have the group's."""
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._done:
            WATCH.resume(self._note)
            try:
                self._pending.wait(seconds if seconds > 0 else self._timeout)
            except RuntimeError as error:
                self._close(WATCH.verdict(self._note, translated(error, self._gone)))
            finally:
                WATCH.leave(self._note)
            self._close(None)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """True if the result is in place, or it failed; never waits."""
        if not self._done:
            try:
                if self._pending.done():
                    self._close(None)
            except RuntimeError as error:
                self._close(translated(error, self._gone))
        return self._done

    def is_success(self) -> bool:
        """True if it is done and nothing failed."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """The error, if the call failed."""
        return self._error if self.is_completed() else None

    def result(self) -> Any:
        """The tensors of the operation."""
        return self._value

    def synchronize(self) -> None:
        """Like `wait`."""
        self.wait()

    def source_rank(self) -> int:
        """The group's rank that sent, for a receive."""
        return self._pending.peer

    def _source_rank(self) -> int:
        return self._pending.peer

    def get_future(self) -> Any:
        """A torch future that yields the tensors."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                self._futures.complete(self, self._future)
            return self._future

    def _close(self, error: BaseException | None) -> None:
        with self._lock:
            if self._done:
                return
            if error is None and self._finish is not None:
                with torch.no_grad():
                    self._finish()
            self._error, self._done = error, True
            self._finish = self._kept = None


class JoinedWork(dist.Work):
    """Joins several `Work` handles into one; `finish` runs once when all are done."""

    def __init__(self, works: list[Any], finish: Callable[[], Any] | None, value: Any) -> None:
        super().__init__()
        self._works, self._finish, self._value = works, finish, value
        if all(w is DONE for w in works):
            self.wait()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all are done."""
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            with torch.no_grad():
                finish()
        return True

    def is_completed(self) -> bool:
        """True if all are done and the result is in place."""
        if all(w.is_completed() for w in self._works):
            self.wait()
            return True
        return False

    def is_success(self) -> bool:
        """True if all are done and nothing failed."""
        return all(w.is_success() for w in self._works)

    def exception(self) -> Any:
        """The first failure."""
        return next((e for w in self._works if (e := w.exception()) is not None), None)

    def result(self) -> Any:
        """The tensors."""
        return self._value

    def synchronize(self) -> None:
        """Like `wait`."""
        self.wait()

    def get_future(self) -> Any:
        """A future that is complete: waits."""
        future: Any = torch.futures.Future()
        self.wait()
        future.set_result(self._value)
        return future


class Futures:
    """The futures of one group's works, and the thread, started on first use, that completes them in order of issue."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def complete(self, work: ShmWork, future: Any) -> None:
        """Complete `future` when `work` is done."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="dsx-comm-futures")
                self._thread.start()
        self._queue.put((work, future))

    def close(self) -> None:
        """End the thread once it is through."""
        self._queue.put(None)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, future = entry
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001  (raised in the thread that waits)
                future.set_exception(error)
            else:
                future.set_result(work.result())
            del work, future, entry
