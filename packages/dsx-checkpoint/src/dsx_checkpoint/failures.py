"""Errors of asynchronous saves, which are kept until a call raises them. No error is lost: if the program ends before,
the process ends with an exit code that is not 0.

A program may save, go on training, and end without `destroy` or `wait_for_checkpoints`. Then no call can raise the
error of its last save. Its exit code would be 0, and a batch script would go on from a checkpoint that does not exist.

In Python an `atexit` function cannot change the exit code, and does not know the one of a `SystemExit`. `os._exit`
there would skip all functions that were registered before, so that temporary files and shared memory would stay. So
the C library is asked to end the process with our code after Python's own end (`_end_with`).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from pathlib import Path

from dsx_comm.shm.native import module

__all__ = ["FAILED_SAVE_EXIT_CODE", "Failures"]

FAILED_SAVE_EXIT_CODE = 1
"""The exit code of a process whose last save has failed, if no call in the program raised the error, and the program
would have ended with 0."""


class Failures:
    """Errors in the order in which they happened, each with the checkpoint that was not written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[Exception, Path]] = []

    def add(self, error: Exception, target: Path) -> None:
        """Keep an error. The process ends with `FAILED_SAVE_EXIT_CODE`, unless the error is raised before."""
        with self._lock:
            if not self._kept:
                atexit.register(self._report_at_exit, os.getpid())
            self._kept.append((error, target))

    def raise_first(self) -> None:
        """Raise the first error, and forget the others."""
        with self._lock:
            kept, self._kept = self._kept, []
            if kept:
                atexit.unregister(self._report_at_exit)
        if kept:
            raise kept[0][0]

    def _report_at_exit(self, pid: int) -> None:
        if pid != os.getpid():  # in a forked child: the save belongs to the parent
            return
        for error, target in self._kept:
            sys.stderr.write(
                f"dsx: {target} was not written: {error}\nThe program ended without a call that raises this error "
                "(engine.destroy or wait_for_checkpoints), so the process ends with exit code "
                f"{FAILED_SAVE_EXIT_CODE}, or with the one that the program asked for\n"
            )
        sys.stderr.flush()
        _end_with(FAILED_SAVE_EXIT_CODE)


def _end_with(code: int) -> None:
    """Let the process end with this exit code after Python has done all its work at exit, if it would end with 0.

    Without native code of dsx-comm, or with a C library other than glibc, the process ends with this code in any case:
    functions of `__cxa_atexit` run after Python's end, in reverse order of registration: `fflush(NULL)`, `_exit(code)`.
    """
    if (native := module()) is not None and native.replace_exit_code_zero(code):
        return
    try:
        libc = ctypes.CDLL(None)
        register, end, flush = libc.__cxa_atexit, libc._exit, libc.fflush
    except (OSError, AttributeError, TypeError):  # a C library without it
        sys.stdout.flush()
        os._exit(code)
    register.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    register(ctypes.cast(end, ctypes.c_void_p), code, None)
    register(ctypes.cast(flush, ctypes.c_void_p), None, None)
