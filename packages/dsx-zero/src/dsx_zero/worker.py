"""A thread of the host that runs jobs one after the other, while the threads that give it jobs go on.

Kernels and copies release Python's global lock (GIL) while they run, so that the main thread goes on with forward and
backward. A launcher that binds a process to cores binds this thread too: threads inherit the cores.

Left out: what the jobs do (`step.host_thread` steps units, `homes.ring` carries gradients), and their order across
several threads.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from dsx_core.device import Device

__all__ = ["Worker"]


class Worker:
    """Runs jobs one after the other, in the order of `submit`, with autograd switched off.

    After a job has failed, the jobs that follow are dropped until `wait` has returned the failure. The thread starts
    with the first job and ends when this object is garbage-collected.

    Args:
        device: if it is a CUDA device, it is the current device while jobs run.
        name: the thread's name, by which counts of the host's waits are told apart.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._device, self._name = device, name
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._state = _State()

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job` after the jobs before it."""
        if self._thread is None:
            arguments = (self._jobs, self._state, self._device)
            self._thread = threading.Thread(target=_run, args=arguments, name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(job)

    def wait(self) -> BaseException | None:
        """Wait until all jobs have ended. Returns the first failure since the last call, or None."""
        self.join()
        failure, self._state.failure = self._state.failure, None
        return failure

    def join(self) -> None:
        """Wait until all jobs have ended. A failure stays for `wait`."""
        if self._thread is not None:
            ended = threading.Event()
            self._jobs.put(_Mark(ended))
            ended.wait()


class _State:
    """The thread's report. It is apart from the `Worker`, which the thread must not keep alive."""

    failure: BaseException | None = None


class _Mark:
    """A job that also runs after a failure."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def __call__(self) -> None:
        self._ended.set()


def _run(jobs: queue.SimpleQueue[Any], state: _State, device: torch.device) -> None:
    Device.of(device).make_current()  # each thread has its own current device
    while (job := jobs.get()) is not None:
        if state.failure is None or isinstance(job, _Mark):
            try:
                with torch.no_grad():
                    job()
            except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
                state.failure = error
        del job  # otherwise the tensors that it holds would live until the next job
