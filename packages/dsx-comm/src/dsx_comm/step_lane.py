"""Step lanes: an asynchronous call of several steps goes on by itself while its caller computes.

A step encodes, communicates and decodes; the next step begins when it is done. If the caller did the steps, the second
one could begin only when the caller waits, and would overlap with nothing. A lane does the steps of a call one after
the other, and calls in their order, so that all ranks use a group in the same order. The groups of these steps must be
used through one lane only.

* Host tensors: a thread, started by the first call, does the steps. It ends when no call has come for some time.
* CUDA tensors: all steps are enqueued at once on a stream of the lane's own, behind what the caller's stream has
  enqueued so far. The host does not wait.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch

from .calls import Call, run
from .collectives import settle
from .errors import CollectiveTimeoutError
from .hang import GRACE
from .works import Handle

Step = tuple[Call | None, Callable[[], None]]
"""The call that observers hear of when a step is issued, and the step itself, which returns when done (CUDA: when
enqueued). None: the step runs its calls itself, because their sizes are known only then.
"""

_IDLE = 1.0  # seconds after which the thread ends


class StepLane:
    """Does the steps of calls; see the module's text.

    Args:
        cuda: torch's module of CUDA streams; tests give a recording one.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._host = _HostSteps()
        self._device = _DeviceSteps(cuda)

    def do(self, steps: Sequence[Step], tensors: Sequence[torch.Tensor], async_op: bool) -> Handle | None:
        """Do the steps of one call.

        Args:
            steps: at least one.
            tensors: what they read and write of the caller's, all on one device; left alone by the caller until the
                handle was waited for.
            async_op: return a handle at once. Otherwise the steps are done when this returns, behind those of earlier
                calls.
        """
        if tensors[0].device.type == "cuda":
            return self._device.do(steps, tensors, async_op)
        if async_op:
            return self._host.begin(steps)
        self._host.drain()
        for call, step in steps:
            _run(call, step)
        return None


def _run(call: Call | None, step: Callable[[], None]) -> None:
    if call is None:
        step()
    else:
        run(call, step)


class Promise:
    """A step that the thread does later, as a Work."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[None] = torch.futures.Future()

    def keep(self, error: BaseException | None) -> None:
        """It is done, or has failed."""
        self._error = error
        self._done.set()
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is done; raises what failed."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise CollectiveTimeoutError(f"the operation did not complete within {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it is done or has failed."""
        return self._done.is_set()

    def get_future(self) -> Any:
        """A future that is completed with it."""
        return self._future


class _HostSteps:
    """The thread and its queue."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[list[tuple[Callable[[], None], Promise]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._last: Promise | None = None
        _ALL.add(self)

    def begin(self, steps: Sequence[Step]) -> Handle:
        """Queue the steps; calls that are known are counted now."""
        promises = [Promise() for _ in steps]
        handles = [
            promise if call is None else run(call, _handing_out(promise), True)
            for (call, _), promise in zip(steps, promises)
        ]
        with self._lock:
            self._queue.put([(step, promise) for (_, step), promise in zip(steps, promises)])
            self._last = promises[-1]
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="dsx-comm-steps")
                self._thread.start()
        return Handle(handles)

    def drain(self) -> None:
        """Return when all queued steps are over; who waits for their handles hears of failures."""
        last = self._last
        if last is not None:
            with suppress(Exception):
                last.wait()

    def finish(self) -> None:
        """End the thread once it is through, or let it be after a moment: a peer that never answers keeps it."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._queue.put(None)
            thread.join(GRACE)

    def forked(self) -> None:
        """This is a child of the process: it has not the thread, and no part in its parent's calls."""
        self.__init__()

    def _work(self) -> None:
        while True:
            try:
                steps = self._queue.get(timeout=_IDLE)
            except Empty:
                with self._lock:
                    if self._queue.empty():
                        self._thread = None
                        return
                continue
            if steps is None:
                return
            error: BaseException | None = None
            for step, promise in steps:
                if error is None:
                    try:
                        with torch.no_grad():
                            step()
                    except BaseException as found:  # noqa: BLE001  (raised in the thread that waits)
                        error = found
                promise.keep(error)
            del steps, error


_ALL: weakref.WeakSet[_HostSteps] = weakref.WeakSet()


def _each(do: Callable[[_HostSteps], None]) -> Callable[[], None]:
    def for_all() -> None:
        for steps in list(_ALL):
            do(steps)

    return for_all


# A thread inside the backend when the interpreter ends would abort the process.
atexit.register(_each(_HostSteps.finish))
os.register_at_fork(after_in_child=_each(_HostSteps.forked))


def _handing_out(promise: Promise) -> Callable[[], Handle]:
    return lambda: settle(Handle([promise]), True)


class _DeviceSteps:
    """The streams, one per device."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._streams: dict[torch.device, Any] = {}

    def do(self, steps: Sequence[Step], tensors: Sequence[torch.Tensor], async_op: bool) -> Handle | None:
        """Enqueue the steps behind what the caller's stream has enqueued; without `async_op` that stream then waits for
        them.
        """
        cuda, device = self._cuda, tensors[0].device
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device=device)
        stream = self._streams[device]
        stream.wait_stream(cuda.current_stream(device))
        with cuda.stream(stream):
            for call, step in steps:
                _run(call, step)
            event = cuda.Event()
            event.record(stream)
        for tensor in tensors:
            tensor.record_stream(stream)  # its memory stays until the stream is through, even if the handle is dropped
        return settle(Handle([_Enqueued(cuda, event, device)]), async_op)


class _Enqueued:
    """Steps that a stream does, as a Work."""

    def __init__(self, cuda: Any, event: Any, device: torch.device) -> None:
        self._cuda, self._event, self._device = cuda, event, device

    def wait(self) -> bool:
        """Let the current stream go on behind the steps. The host does not wait."""
        self._cuda.current_stream(self._device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Whether the device is through."""
        return self._event.query()

    def get_future(self) -> Any:
        """There is none: who wants to hear of the end asks `is_completed`."""
        raise RuntimeError("steps on a stream have no future")
