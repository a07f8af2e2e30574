"""The engine in pure Python: positioned reads and writes of a thread pool, through the page cache.

It has the same methods as the compiled engine. It is the fallback where there is no compiler, and the reference that
tests compare the other engines with. Direct I/O and registration are left out.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

END_OF_FILE = -1  # as in the compiled module
MAX_PIECE = 1 << 30
_lock_for_seek = threading.Lock()


def _read_into(fd: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    if hasattr(os, "pread"):
        data = os.pread(fd, len(view), offset)
    else:
        with _lock_for_seek:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(view))
    view[: len(data)] = data
    return len(data)


def _write_from(fd: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, view, offset)
    with _lock_for_seek:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, view)


class PythonEngine:
    """Reads and writes at given offsets with a pool of threads: the compiled engine's methods without a compiler.

    Options as those of the compiled engine; `workers` threads move `block_size` bytes at a time.
    """

    def __init__(self, block_size: int, workers: int) -> None:
        self._block = min(max(1, block_size), MAX_PIECE)
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="dsx-nvme")
        self._ids = itertools.count(1)
        self._jobs: dict[int, list[Future[tuple[int, int, int]]]] = {}
        self._lock = threading.Lock()
        self._stats = {"bytes_read": 0, "bytes_written": 0, "requests": 0, "submissions": 0, "partial": 0}

    def submit(
        self, write: bool, direct_fd: int, plain_fd: int, file_slot: int, memory: int, nbytes: int, offset: int,
        memory_align: int, offset_align: int,
    ) -> int:  # fmt: skip
        """Start a transfer; returns its number."""
        view = memoryview((ctypes.c_char * nbytes).from_address(memory)).cast("B") if nbytes else memoryview(b"")
        starts = range(0, nbytes, self._block)
        move = _write_from if write else _read_into
        jobs = [self._begin(move, write, plain_fd, view[s : s + self._block], offset + s) for s in starts]
        with self._lock:
            number = next(self._ids)
            self._jobs[number] = jobs
            self._stats["requests"] += 1
        return number

    def _begin(self, *piece: Any) -> Future[tuple[int, int, int]]:
        try:
            return self._pool.submit(self._piece, *piece)
        except RuntimeError:
            # At interpreter exit the pool accepts no work any more. A transfer that another thread has under way must
            # still be finished, so this thread does the work.
            done: Future[tuple[int, int, int]] = Future()
            done.set_result(self._piece(*piece))
            return done

    def _piece(self, move: Any, write: bool, fd: int, view: memoryview, offset: int) -> tuple[int, int, int]:
        """(bytes moved, errno or END_OF_FILE or 0, offset of the error)."""
        done = 0
        while done < len(view):
            try:
                count = move(fd, view[done:], offset + done)
            except OSError as error:
                return done, error.errno or 5, offset + done
            with self._lock:
                self._stats["submissions"] += 1
                self._stats["bytes_written" if write else "bytes_read"] += count
                self._stats["partial"] += count < len(view) - done
            if count == 0:
                return done, END_OF_FILE, offset + done
            done += count
        return done, 0, 0

    def wait(self, number: int, seconds: float) -> tuple[int, int, int] | None:
        """The outcome of a transfer (bytes, error, offset of the error), or None if it is not there after `seconds`."""
        jobs = self._jobs[number]
        if wait(jobs, None if seconds < 0 else seconds).not_done:
            return None
        with self._lock:
            self._jobs.pop(number, None)
        results = [job.result() for job in jobs]
        failed = next((r for r in results if r[1]), (0, 0, 0))
        return sum(r[0] for r in results), failed[1], failed[2]

    def poll(self, number: int) -> bool:
        """Whether a transfer has finished."""
        return all(job.done() for job in self._jobs.get(number, ()))

    def add_buffer(self, memory: int, nbytes: int) -> int:
        """Does nothing: this engine has no registration."""
        return -1

    def drop_buffer(self, slot: int) -> None:
        """Does nothing: nothing was registered."""

    def add_file(self, fd: int) -> int:
        """Does nothing: this engine has no registration."""
        return -1

    def drop_file(self, slot: int) -> None:
        """Does nothing: nothing was registered."""

    def statistics(self) -> dict[str, Any]:
        """Counters, under the names of the compiled engine."""
        zero = dict.fromkeys(
            ("direct_bytes", "bounced_bytes", "retries", "direct_refused", "registered_buffers", "registered_files"), 0
        )
        with self._lock:
            return {**self._stats, **zero, "fixed_submissions": 0, "registration_refused": "the engine is pure Python"}

    def close(self) -> None:
        """Wait for all transfers and end the threads."""
        self._pool.shutdown(wait=True)
