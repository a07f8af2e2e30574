"""A transfer in flight: it can be waited for, keeps its memory alive, and checks the result.

A ticket keeps the tensor and its memory alive until the transfer has ended. It compares the tensor's version with the
one at the start: a write to the tensor during the transfer raises a data-race error, instead of leaving unexpected
bytes in a file. It turns the kernel's answer into an exception with file, offset and errno.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from .errors import DataRaceError, EndOfFileError, ForkError, TransferError

END_OF_FILE = -1
SLICE = 0.2  # seconds; a wait checks for Python's signals so often
_NOTHING = torch.empty(0, device="cpu")


class Outcome(NamedTuple):
    """The end of a transfer."""

    moved: int  # bytes
    error: int = 0  # errno, or END_OF_FILE
    where: int = 0  # offset of the error in the file
    lost: bool = False  # the engine failed, and the kernel may still work on the memory


class Job(Protocol):
    """Work that runs in the background."""

    def wait(self, seconds: float) -> Outcome | None:
        """The outcome, or None if it is not there after `seconds`. The outcome is returned only once."""
        ...

    def poll(self) -> bool:
        """Whether `wait` would return the outcome at once."""
        ...


@dataclass
class EngineJob:
    """A request of an engine (compiled or Python)."""

    engine: Any
    number: int

    def wait(self, seconds: float) -> Outcome | None:
        found = self.engine.wait(self.number, seconds)
        return None if found is None else Outcome(*found)

    def poll(self) -> bool:
        return self.engine.poll(self.number)


@dataclass
class FutureJob:
    """Work of threads in one or several parts; each part returns its number of bytes or raises.

    It has ended when all parts have ended; the error is that of the first part that failed. `through_torch`: a read
    fills the tensor with torch's functions, which raise its version.
    """

    parts: Sequence[Future[int]]
    through_torch: bool = False

    def wait(self, seconds: float) -> Outcome | None:
        # Not with result(seconds): its timeout is a TimeoutError only from Python 3.11 on, and the work may raise one
        # itself.
        if futures.wait(self.parts, seconds).not_done:
            return None
        try:
            return Outcome(sum(part.result() for part in self.parts))
        except CancelledError:
            return Outcome(0, errno.ECANCELED)

    def poll(self) -> bool:
        return all(part.done() for part in self.parts)


@dataclass(frozen=True)
class Description:
    """The facts of a transfer, for messages and checks."""

    op: str  # "read" or "write"
    path: str
    offset: int
    nbytes: int


@dataclass
class Guard:
    """The tensor of a transfer, its place in memory, and (if it has a storage of its own) its version at the start.

    It keeps the storage alive. So memory that the kernel writes to is not freed when the tensor gets another storage
    (`set_`, `.data =`). `UntypedStorage.resize_` still frees it; nothing outside of torch can prevent that.
    """

    tensor: torch.Tensor
    start: int = 0
    end: int = 0
    version: int | None = None
    storage: torch.UntypedStorage | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Guard:
        """Record the tensor's present state."""
        start, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        # A slice shares its version with its whole storage, and the caller may write to other parts of that.
        storage = tensor.untyped_storage()
        whole = not tensor.is_inference() and nbytes == storage.nbytes()
        return cls(tensor, start, start + nbytes, tensor._version if whole else None, storage)

    def check(self, what: Description) -> None:
        """Raise DataRaceError if the tensor was written to, moved or freed since."""
        moved = self.tensor.data_ptr() != self.start
        changed = self.version is not None and self.tensor._version != self.version
        if moved or changed:
            how = "was moved or resized" if moved else "was written to"
            raise DataRaceError(
                f"the tensor {how} while its {what.op} of {what.path} was in flight; call wait() before touching it. "
                "The bytes that arrived are undefined"
            )


def _at(where: int) -> int:
    return where


def _nothing() -> None:
    pass


# Memory that the kernel did not give back when its engine failed. The list is never emptied: the kernel may write to
# this memory until the process ends, so it must not be freed and used for anything else (test_nvme_engine_failure.py).
_LOST: list[Guard] = []


@dataclass
class Ticket:
    """A transfer in flight. `Engine.read` and `Engine.write` return it. It can be awaited too.

    `wait()` returns the number of bytes moved, or raises; it may be called from any thread, any number of times.
    """

    job: Job
    what: Description
    guard: Guard
    over: Callable[[], None] = field(repr=False)  # called once, when the transfer has ended
    after: tuple[Callable[[], None], ...] = field(default=(), repr=False)  # called once, in order, after success
    failed_write: Callable[[], None] = field(default=_nothing, repr=False)  # called once, after an error, before `over`
    end_before: Callable[[int], int] = field(default=_at, repr=False)  # the file's end, for an error at an offset

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._settled = False
        self.reported = False  # whether `wait` has raised the error
        self._moved = 0
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the transfer has ended, well or badly."""
        self._own()
        return self._settled or self.job.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the transfer; returns the number of bytes moved.

        Raises `TransferError` (an OSError), `DataRaceError`, or TimeoutError after `timeout` seconds.
        """
        self._own()
        limit = None if timeout is None else time.monotonic() + timeout
        while not self._settled:
            left = SLICE if limit is None else min(SLICE, limit - time.monotonic())
            if not self._lock.acquire(timeout=max(0.0, left)):
                if limit is not None and time.monotonic() >= limit:
                    raise self._late(timeout)
                continue
            try:
                if not self._settled:
                    self._try_settle(max(0.0, left))
            finally:
                self._lock.release()
            if not self._settled and limit is not None and time.monotonic() >= limit:
                raise self._late(timeout)
        if self._error is not None:
            self.reported = True
            raise self._error
        return self._moved

    result = wait

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The exception that `wait` would raise, or None."""
        self._own()
        reported = self.reported
        with contextlib.suppress(Exception):
            self.wait(timeout)
        if not self._settled:
            raise self._late(timeout)
        self.reported = reported
        return self._error

    def __await__(self) -> Generator[Any, None, int]:
        import asyncio  # lazy import: most programs never await

        loop = asyncio.get_running_loop()
        return loop.run_in_executor(None, self.wait).__await__()

    def settle_if_done(self) -> bool:
        """Take the outcome if it is there, without waiting; returns True if the transfer has ended."""
        if not self._settled and self._lock.acquire(blocking=False):
            try:
                if not self._settled and self.job.poll():
                    self._try_settle(0.0)
            finally:
                self._lock.release()
        return self._settled

    @property
    def settled(self) -> bool:
        """Whether an earlier call has seen the end of the transfer. It does not ask the engine, so a forked child may
        use it too.
        """
        return self._settled

    @property
    def failed(self) -> bool:
        """Whether the transfer has ended with an error."""
        return self._error is not None

    def _own(self) -> None:
        if not self._settled and os.getpid() != self._pid:
            raise ForkError(f"the {self.what.op} of {self.what.path} belongs to the parent process; wait for it there")

    def _late(self, timeout: float | None) -> TimeoutError:
        what = self.what
        return TimeoutError(
            f"{what.op} of {what.nbytes} bytes, {what.path} at {what.offset}: not over after {timeout} s"
        )

    def _try_settle(self, seconds: float) -> None:
        """Take the outcome; the caller holds the lock."""
        try:
            outcome = self.job.wait(seconds)
            if outcome is None:
                return
            self._moved = outcome.moved
            self._error = self._judge(outcome)
            if outcome.lost:
                _LOST.append(self.guard)
                self.failed_write = _nothing  # the kernel may still be writing to the file too
        except Exception as error:  # noqa: BLE001  kept, and raised by wait()
            self._error = error
        if isinstance(self._error, TransferError):
            self.failed_write()
        self.over()
        try:
            if self._error is None:
                for step in self.after:
                    step()
        except Exception as error:  # noqa: BLE001  kept, and raised by wait()
            self._error = error
        self.after = ()
        self.guard = Guard(_NOTHING)  # the caller may use the tensor again, and a kept ticket must not keep it alive
        self._settled = True

    def _judge(self, outcome: Outcome) -> BaseException | None:
        what, number, where = self.what, outcome.error, outcome.where
        if outcome.lost:
            text = (
                f"{os.strerror(number)}: the I/O engine failed during a {what.op} of {what.nbytes} bytes, and the"
                " kernel has not given their memory back. It is kept until the process ends; do not use this tensor"
                " again, close the Engine and make a new one"
            )
            return TransferError(number, text, what.path, op=what.op, offset=where, nbytes=what.nbytes)
        if number == END_OF_FILE:
            end = self.end_before(where)
            return EndOfFileError.at(end, what.path, offset=what.offset, where=where, nbytes=what.nbytes)
        if number:
            return TransferError.of(number, what.path, op=what.op, offset=where, nbytes=what.nbytes)
        try:
            self.guard.check(what)
        except DataRaceError as race:
            return race.with_traceback(None)  # frames of the traceback would keep the memory alive with the error
        if what.op == "read" and not self.guard.tensor.is_inference():
            torch.autograd.graph.increment_version(self.guard.tensor)  # so that autograd sees the write
        return None
