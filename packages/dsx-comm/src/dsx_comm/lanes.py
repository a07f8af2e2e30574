"""Lanes, on which gathers, reductions and copies run during the computation: one interface, three kinds.

A lane runs the jobs submitted to it one after the other, in order. ``submit`` starts a job, or only queues it, and
returns a ticket. After ``Ticket.wait`` the caller (its stream, on CUDA) sees the job's results. ``free_after_use``
frees a buffer with which the caller has finished: jobs submitted later may take its memory, but nothing that could
still run before the caller's last use.

* ``HostLane``: jobs start at once; what they return (a pending collective) is waited for.
* ``CudaLane``: jobs are enqueued on a stream of their own; waiting is a stream wait, never a host wait. The caller's
  stream is the current one of the lane's device, whatever device is current. Memory allocated in a job belongs to the
  lane's stream: it may be dropped in the job, and outside only behind an event of the stream that used it last
  (``free_after_use``). Memory allocated outside must stay referenced until its ticket was waited for.
* ``DeferringLane``: for tests. Nothing runs until it is waited for, and buffers are filled with NaN before they are
  freed. Code that reads before it waits, or after it has freed a buffer, gets NaN.

Left out: priorities, and several streams per lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

from .works import Handle


class Pending(Protocol):
    """A result of a job that is still in flight."""

    def wait(self) -> object: ...


class Buffer(Protocol):
    """Memory that a lane frees for its user."""

    def free(self) -> None: ...

    def poison(self) -> None:
        """Fill it with NaN, if it is there and can hold them."""
        ...


class TensorBuffer:
    """A tensor as a lane frees it: staging memory of copies and reductions."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor

    def free(self) -> None:
        """Let the tensor go."""
        self._tensor = None

    def poison(self) -> None:
        """Fill it with NaN, if it is there and can hold them."""
        if self._tensor is not None and self._tensor.is_floating_point():
            self._tensor.fill_(float("nan"))


Job = Callable[[], "Pending | None"]


OnTransfer = Callable[[str, int], AbstractContextManager[object]]
"""Is told of a copy between tiers: what it is ("to host", "from host", "to device"), and its bytes. The copy is made,
or enqueued, inside the context that is returned.
"""


def told(lane: Lane, job: Job, what: str, nbytes: int) -> Job:
    """A job of `lane` that copies between tiers, and reports that to the lane's listener (`on_transfer`), if any."""
    listener: OnTransfer | None = getattr(lane, "on_transfer", None)
    if listener is None:
        return job

    def reporting() -> Pending | None:
        with listener(what, nbytes):
            return job()

    return reporting


def transfer(lane: Lane, job: Job, what: str, nbytes: int) -> Ticket:
    """Submit a copy between tiers, and report it (`told`)."""
    return lane.submit(told(lane, job, what, nbytes))


def is_done(pending: Pending) -> bool:
    """Is it known that nothing is under way any more? What cannot be asked is taken to be under way. Torch's works are
    asked by `is_completed`, the transfers of stores by `done`.
    """
    ask = getattr(pending, "is_completed", None) or getattr(pending, "done", None)
    return ask is not None and bool(ask())


class Ticket(Protocol):
    """One submitted job."""

    def is_completed(self) -> bool:
        """Would `wait` return at once? Never waits."""
        ...

    def wait(self) -> object:
        """Let the caller's side go on only with the job's results in place. Waiting twice is harmless."""
        ...

    def synchronize(self) -> None:
        """Like `wait`, and the host continues only then: for results that the host reads, or that go back to an
        allocator.
        """
        ...


class Lane(Protocol):
    """Runs the jobs submitted to it one after the other, beside the computation."""

    def submit(self, job: Job, *, see_writes_so_far: bool = False) -> Ticket:
        """Start or queue `job`; with `see_writes_so_far`, behind what the caller's side has written so far."""
        ...

    def see_writes_so_far(self) -> None:
        """Let jobs submitted from now on see what the caller's side has written so far (updated shards)."""
        ...

    def free_after_use(self, buffer: Buffer) -> None:
        """Free `buffer`, of which the caller's side has made its last use: no job may overwrite it before that use."""
        ...


class _HostTicket:
    def __init__(self, pending: Pending | None) -> None:
        self._pending = pending

    def is_completed(self) -> bool:
        return self._pending is None or is_done(self._pending)

    def wait(self) -> None:
        pending = self._pending
        try:
            if pending is not None:
                pending.wait()
        finally:
            self._pending = None  # only now: another thread that asks meanwhile has to wait too

    def synchronize(self) -> None:
        """The same: what runs on the host is finished when it was waited for."""
        self.wait()


class HostLane:
    """Jobs start at once in the calling thread."""

    on_transfer: OnTransfer | None = None
    """Is told of copies between tiers; see `transfer`."""

    def submit(self, job: Job, *, see_writes_so_far: bool = False) -> Ticket:
        """Run ``job`` now; the ticket waits for what it left pending. A `Handle` is a ticket itself."""
        pending = job()
        return pending if isinstance(pending, Handle) else _HostTicket(pending)

    def see_writes_so_far(self) -> None:
        """Nothing to do: one thread."""

    def free_after_use(self, buffer: Buffer) -> None:
        """Free at once: host operations are finished when they return."""
        buffer.free()


class _CudaTicket:
    def __init__(self, event: torch.cuda.Event, device: torch.device, pending: Pending | None) -> None:
        self._event, self._device = event, device
        self._pending = pending  # keeps the collective's own references alive until it is waited for

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._pending = None

    def synchronize(self) -> None:
        if not self._event.query():
            self._event.synchronize()
        self._pending = None


_LAST_USES: dict[torch.cuda.Stream, dict[torch.cuda.Stream, torch.cuda.Event]] = {}
"""For the stream of a lane: the last uses, on other streams, of memory that was freed and that no job has waited for.
They belong to the stream, not to the lane. Torch hands out 32 streams in turn, so that a later lane may have the stream
of an earlier one, and with it the memory that the earlier one has freed.
"""


class CudaLane:
    """Jobs are enqueued on a stream of this lane's own, until a process has more than 32 lanes: then some share one."""

    on_transfer: OnTransfer | None = None
    """Is told of copies between tiers; see `transfer`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device=device, priority=-1)
        self._device = self._stream.device
        self._last_uses = _LAST_USES.setdefault(self._stream, {})

    def submit(self, job: Job, *, see_writes_so_far: bool = False) -> Ticket:
        """Enqueue ``job`` behind the last use of the memory that was freed before: ``job`` may get that memory."""
        if see_writes_so_far:
            self.see_writes_so_far()
        if self._last_uses:
            for last_use in self._last_uses.values():
                self._stream.wait_event(last_use)
            self._last_uses.clear()
        with torch.cuda.stream(self._stream):
            pending = job()
            if pending is not None:
                pending.wait()  # a stream wait: the collective's stream holds this one up, not the host
            event = torch.cuda.Event()
            event.record(self._stream)
        return _CudaTicket(event, self._device, pending)

    def see_writes_so_far(self) -> None:
        """Let the jobs submitted from now on see what the caller's stream has enqueued so far (updated shards)."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def free_after_use(self, buffer: Buffer) -> None:
        """Free behind everything the caller's stream has enqueued: later jobs wait for this moment before they
        allocate. One event is kept for each stream that has freed something, the latest: a stream is in order.
        """
        stream, event = torch.cuda.current_stream(self._device), torch.cuda.Event()
        event.record(stream)
        self._last_uses[stream] = event
        buffer.free()


class _DeferredTicket:
    def __init__(self, lane: DeferringLane, job: Job) -> None:
        self._lane, self.job = lane, job

    def is_completed(self) -> bool:
        return not self._lane.is_queued(self)

    def wait(self) -> None:
        self._lane.run_through(self)

    def synchronize(self) -> None:
        self._lane.run_through(self)


class DeferringLane:
    """Nothing runs before it must; freed memory is poisoned."""

    def __init__(self) -> None:
        self._queue: deque[_DeferredTicket] = deque()

    def submit(self, job: Job, *, see_writes_so_far: bool = False) -> Ticket:
        """Queue ``job``."""
        ticket = _DeferredTicket(self, job)
        self._queue.append(ticket)
        return ticket

    def see_writes_so_far(self) -> None:
        """Nothing to do: one thread."""

    def is_queued(self, ticket: _DeferredTicket) -> bool:
        """Has the job not run yet?"""
        return ticket in self._queue

    def run_through(self, ticket: _DeferredTicket) -> None:
        """Run the queue up to and with ``ticket``."""
        while ticket in self._queue:
            pending = self._queue.popleft().job()
            if pending is not None:
                pending.wait()

    def free_after_use(self, buffer: Buffer) -> None:
        """Fill with NaN, then free."""
        buffer.poison()
        buffer.free()

    def drain(self) -> None:
        """Run everything that is queued."""
        if self._queue:
            self.run_through(self._queue[-1])


_MAKER: ContextVar[Callable[[torch.device], Lane] | None] = ContextVar("lanes", default=None)


@contextmanager
def lanes_from(maker: Callable[[torch.device], Lane]) -> Iterator[None]:
    """Inside the block models get their lanes from ``maker(device)``: for programs that record what runs beside
    what.
    """
    token = _MAKER.set(maker)
    try:
        yield
    finally:
        _MAKER.reset(token)


def make_lane(device: torch.device) -> Lane:
    """The lane for buffers on ``device``."""
    maker = _MAKER.get()
    if maker is not None:
        return maker(device)
    return CudaLane(device) if device.type == "cuda" else HostLane()
