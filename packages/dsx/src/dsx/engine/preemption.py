"""Saves and ends the run when the machine is taken away: after a signal on any rank, all ranks save one checkpoint.

    engine.save_on_preemption("ckpt")      # SIGTERM and SIGUSR1, of Slurm, Kubernetes and spot machines

The signal handler only notes the signal. A thread of each rank looks several times per second for such notes: its own,
and those of other ranks in the job's store. If there is one, the threads agree on an update (`gate.py`). After that
update each rank saves and raises `Preempted`, a `SystemExit` with the code `RESUME_EXIT_CODE`. `dsx launch` passes this
code on, and starts the ranks again if `--restarts` says so; batch scripts can requeue on it.

A rank that is in an evaluation saves there, because an evaluation changes nothing. A rank that waits for data or for
another rank saves after that wait.

The sender of the signal decides how much time the ranks have. The previous checkpoint stays until the new one is
complete. If ranks are started again in any case, waiting for a rank that is gone would only cost time: with `grace_s` a
rank ends if it could not stop with the others within that time after the signal. It then receives signals also while
its training thread waits inside a collective, where Python runs no handler.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from dsx_launch.exit_codes import RESUME_EXIT_CODE

from ..utils.logging import logger
from .errors import EngineArgumentError
from .stepper import StepGate

__all__ = ["RESUME_EXIT_CODE", "Preempted", "PreemptionWatch"]

_LOOK_EVERY_S = 0.2


class Preempted(SystemExit):
    """The job was asked to end, has saved, and can be resumed. Ends the process with `RESUME_EXIT_CODE`."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(RESUME_EXIT_CODE)
        self.path, self.reason = path, reason


class PreemptionWatch:
    """Watches for signals on all ranks. Made on every rank, on the main thread; collective.

    Args:
        ranks: for the thread; over a process group that nothing else uses.
        gate: stops training on all ranks.
        save: writes the checkpoint on all ranks and returns its folder.
        signals: names of signals, such as "SIGTERM".
        store: the job's store; None with one rank.
        grace_s: a rank that could not stop with the others after so many seconds ends; None: it waits for them.
    """

    def __init__(
        self,
        ranks: Any,
        gate: StepGate,
        save: Callable[[], str],
        signals: Sequence[str],
        store: Any = None,
        grace_s: float | None = None,
    ) -> None:
        numbers = [_number(name) for name in signals]
        if threading.current_thread() is not threading.main_thread():
            raise EngineArgumentError("save_on_preemption: Python handles signals on the main thread; call it there")
        self._ranks, self._gate, self._save, self._store = ranks, gate, save, store
        self._key = f"dsx_preempted/{ranks.gather(uuid.uuid4().hex)[0]}"
        self._note = ""
        self._closed, self._stopping = threading.Event(), threading.Event()
        self._grace_s = grace_s
        self._waker = _NoWaker() if grace_s is None else _Waker(numbers)
        self._before = {number: signal.signal(number, self._take_note) for number in numbers}
        self._thread = threading.Thread(target=self._watch, name="dsx-preemption", daemon=True)
        self._thread.start()

    def _take_note(self, number: int, frame: object) -> None:
        self._note = self._note or _said(number, self._ranks.rank)

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_EVERY_S):
            if number := self._waker.heard():
                self._note = self._note or _said(number, self._ranks.rank)
            reason = self._find()
            if reason:
                logger.warning("%s: all ranks save and end", reason)
                self._limit_wait()
                self._gate.agree(self._ranks, functools.partial(self._stop, reason))
                return

    def _limit_wait(self) -> None:
        if self._grace_s is not None:
            threading.Thread(target=self._give_up, args=(self._grace_s,), name="dsx-grace", daemon=True).start()

    def _give_up(self, seconds: float) -> None:
        if self._stopping.wait(seconds) or self._closed.is_set():
            return
        logger.warning("the ranks did not stop together within %g s; this one ends", seconds)
        os._exit(128 + signal.SIGTERM)  # the training thread waits in a collective, where no exception reaches it

    def _find(self) -> str:
        if self._store is None:
            return self._note
        try:
            if self._note:
                self._store.compare_set(self._key, "", self._note)
            return self._store.get(self._key).decode() if self._store.check([self._key]) else ""
        except RuntimeError as error:  # the job is ending, and the store with it
            logger.debug("preemption: the job's store does not answer: %s", error)
            self._closed.set()
            return ""

    def _stop(self, reason: str) -> None:
        self._stopping.set()
        path = self._save()
        logger.warning("%s: saved %s; ending with exit code %d", reason, path, RESUME_EXIT_CODE)
        self._before = {}  # keep our handlers: a second signal while this process ends must not kill it
        raise Preempted(path, reason)

    def close(self) -> None:
        """Restore the earlier signal handlers."""
        self._closed.set()
        self._waker.close()
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._take_note:
                    signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}


class _NoWaker:
    """Without `grace_s`: only the signal handler notes signals."""

    def heard(self) -> int:
        """Returns 0."""
        return 0

    def close(self) -> None:
        """Does nothing."""


class _Waker:
    """Receives signals without the training thread: the interpreter writes their numbers to a socket at once.

    Args:
        numbers: the numbers of the signals to receive.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = set(numbers)
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def heard(self) -> int:
        """The number of a signal that has arrived since the last call, or 0."""
        try:
            data = self._read.recv(4096)
        except (BlockingIOError, OSError):  # nothing has come, or it is closed
            return 0
        return next((number for number in data if number in self._numbers), 0)

    def close(self) -> None:
        """Restore the interpreter's earlier descriptor. Call it on the main thread."""
        if threading.current_thread() is threading.main_thread() and self._write.fileno() >= 0:
            signal.set_wakeup_fd(self._before)
            self._read.close()
            self._write.close()


def _said(number: int, rank: int) -> str:
    return f"{signal.Signals(number).name} on rank {rank}"


def _number(name: str) -> signal.Signals:
    try:
        return signal.Signals[name]
    except (KeyError, TypeError):
        raise EngineArgumentError(
            f"save_on_preemption(signals=...): got {name!r}, expected names of signals such as 'SIGTERM' and 'SIGUSR1'"
        ) from None
