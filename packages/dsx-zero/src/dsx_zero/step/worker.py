"""A thread that runs the host's part of a step beside the main one.

Kernels release Python's lock while they run, so that the main thread goes on with forward and backward.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Worker"]


class Worker:
    """Runs jobs one after the other, in the order of `submit`, without gradients.

    After a job has failed, those that follow are dropped until `wait` has told of the failure. The thread begins with
    the first job and ends when this object goes.

    Args:
        device: the current device of the jobs, where it is a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._state = _State()

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job` when those before it have ended."""
        if self._thread is None:
            arguments = (self._jobs, self._state, self._device)
            self._thread = threading.Thread(target=_run, args=arguments, name="dsx-zero-step", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(job)

    def wait(self) -> BaseException | None:
        """Wait until all jobs have ended. The first failure since the last call; None: there was none."""
        if self._thread is None:
            return None
        ended = threading.Event()
        self._jobs.put(_Mark(ended))
        ended.wait()
        failure, self._state.failure = self._state.failure, None
        return failure


class _State:
    """What the thread tells of; not the `Worker`, which the thread must not keep alive."""

    failure: BaseException | None = None


class _Mark:
    """A job that runs after failures too."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def __call__(self) -> None:
        self._ended.set()


def _run(jobs: queue.SimpleQueue[Any], state: _State, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the current device is a thread's own
    while (job := jobs.get()) is not None:
        if state.failure is None or isinstance(job, _Mark):
            try:
                with torch.no_grad():
                    job()
            except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
                state.failure = error
        del job  # what it holds must not live until the next one
