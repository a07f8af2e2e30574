"""Saving and ending when the machine is taken away: a signal on any rank becomes one checkpoint of all.

    engine.save_on_preemption("ckpt")      # SIGTERM and SIGUSR1, of Slurm, Kubernetes and spot machines

The handler of a signal only takes a note. A thread of each rank looks for notes a few times a second, its own and, in
the job's store, those of the other ranks. When there is one, the threads agree on an update (`gate.py`); after it each
rank saves and raises `Preempted`, a `SystemExit` with the code `RESUME_EXIT_CODE`. `dsx launch` hands this code on, and
starts the ranks again if `--restarts` says so; batch scripts can requeue on it.

A rank that is in an evaluation saves there, because an evaluation changes nothing. A rank that waits for data or for
another rank saves when that is over.

Left out: grace periods. What sends the signal decides how long the ranks have; the checkpoint that was there before
stays until the new one is whole.
"""

from __future__ import annotations

import functools
import signal
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ..exit_codes import RESUME_EXIT_CODE
from ..utils.logging import logger
from .errors import EngineArgumentError
from .gate import StepGate

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
        ranks: for the thread; of a process group that nothing else uses.
        gate: where training stops.
        save: writes the checkpoint on all ranks and returns its folder.
        signals: names, such as "SIGTERM".
        store: the job's store; None with one rank.
    """

    def __init__(
        self, ranks: Any, gate: StepGate, save: Callable[[], str], signals: Sequence[str], store: Any = None
    ) -> None:
        numbers = [_number(name) for name in signals]
        if threading.current_thread() is not threading.main_thread():
            raise EngineArgumentError("save_on_preemption: Python handles signals on the main thread; call it there")
        self._ranks, self._gate, self._save, self._store = ranks, gate, save, store
        self._key = f"dsx_preempted/{ranks.gather(uuid.uuid4().hex)[0]}"
        self._note = ""
        self._closed = threading.Event()
        self._before = {number: signal.signal(number, self._take_note) for number in numbers}
        self._thread = threading.Thread(target=self._watch, name="dsx-preemption", daemon=True)
        self._thread.start()

    def _take_note(self, number: int, frame: object) -> None:
        self._note = self._note or f"{signal.Signals(number).name} on rank {self._ranks.rank}"

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_EVERY_S):
            reason = self._find()
            if reason:
                logger.warning("%s: all ranks save and end", reason)
                self._gate.agree(self._ranks, functools.partial(self._stop, reason))
                return

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
        path = self._save()
        logger.warning("%s: saved %s; ending with exit code %d", reason, path, RESUME_EXIT_CODE)
        self._before = {}  # the launcher may ask again while this process ends: that must not kill it
        raise Preempted(path, reason)

    def close(self) -> None:
        """Give the signals back to who handled them before."""
        self._closed.set()
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._take_note:
                    signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}


def _number(name: str) -> signal.Signals:
    try:
        return signal.Signals[name]
    except (KeyError, TypeError):
        raise EngineArgumentError(
            f"save_on_preemption(signals=...): got {name!r}, expected names of signals such as 'SIGTERM' and 'SIGUSR1'"
        ) from None
