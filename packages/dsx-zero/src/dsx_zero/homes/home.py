"""`Home`: access to shards, masters, gradient shards and optimizer states, wherever they live.

A home holds the elements of one flat tensor. A home in memory gives them as a `view`, and nothing is copied. Other
homes have no view: `fetch` and `store` copy the elements, as jobs of a lane, so that the copies run at the same time as
computation. Code elsewhere does not ask where the elements are: it calls `read`, `write`, `opened` or `accumulate`,
which use the view where there is one and copy where there is none.

This module does not decide when elements are fetched and stored. The plan of the step and the order of the gathers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from dsx_comm.lanes import HostLane, Job, Lane, Pending, Ticket, told, transfer

from ..errors import ZeroStateError
from .pinned import locked_empty

__all__ = [
    "Cuttable",
    "DeviceHome",
    "Discardable",
    "Home",
    "HostHome",
    "ReadsAhead",
    "accumulate",
    "block_norm",
    "discard",
    "fetching",
    "opened",
    "read",
    "write",
]


class Home(Protocol):
    """Holds a flat tensor of `numel` elements."""

    @property
    def numel(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device:
        """The device on which buffers for `fetch` and `store` should be; other devices work too."""
        ...

    @property
    def tier(self) -> str:
        """The name under which its bytes are counted."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes it holds now."""
        ...

    def view(self) -> torch.Tensor | None:
        """The elements themselves (1-D), for reading and writing in place, after every `store` has ended. None where
        the elements are not in the memory of this process.
        """
        ...

    def fetch(self, out: torch.Tensor, lane: Lane, *, start: int = 0) -> Ticket:
        """Copy the elements from `start` on into `out` (1-D, contiguous), as a job of `lane`. Elements that were never
        stored are zeros, or arbitrary where there is a view.
        """
        ...

    def store(self, values: torch.Tensor, lane: Lane, *, start: int = 0) -> Ticket:
        """Copy `values` (1-D, contiguous) to the elements from `start` on, as a job of `lane`. Do not write to `values`
        before you have waited for the ticket.
        """
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A home in a slow place (disk) whose elements can be read into host memory before they are fetched."""

    @property
    def numel(self) -> int: ...

    @property
    def is_ahead(self) -> bool:
        """Was it read ahead, but not taken yet?"""
        ...

    @property
    def is_direct(self) -> bool:
        """Do fetches go straight to the device, so that the host does not wait for them?"""
        ...

    def read_ahead(self) -> None:
        """Start reading all elements into host memory. Does nothing if that is under way."""
        ...

    def take(self) -> tuple[torch.Tensor, Pending]:
        """All elements in host memory, and what to wait for: those that were read ahead; if none were, reading starts
        now.
        """
        ...

    def free_after_copy(self, values: torch.Tensor, device: torch.device) -> None:
        """A copy of the elements of `take` was enqueued on the current stream of `device`, and their memory is free
        behind it.
        """
        ...

    def forget_ahead(self) -> None:
        """Drop the elements that were read ahead."""
        ...


@runtime_checkable
class Cuttable(Protocol):
    """A home that is divided into pieces, and reads and writes them whole."""

    def cut_at(self, places: Iterable[int]) -> None:
        """Let pieces begin at these elements. Must be called before anything is stored."""
        ...


@runtime_checkable
class Discardable(Protocol):
    """A home whose memory or disk space is not released with the object."""

    def discard(self) -> None:
        """Release the space of the values, which are not needed any more."""
        ...


def discard(home: Home) -> None:
    """Release the space of values that are not needed any more, where the end of the object would not release it."""
    if isinstance(home, Discardable):
        home.discard()


class _InMemory:
    """Base of the homes that have a view."""

    tier = ""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.away: str | None = None
        """The reason why the values are absent at the moment (`offload_states`); None: they are there."""

    @property
    def numel(self) -> int:
        return self._tensor.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    @property
    def memory(self) -> torch.Tensor:
        """The tensor itself, even while its values are absent."""
        return self._tensor

    def view(self) -> torch.Tensor:
        if self.away is not None:
            raise ZeroStateError(f"the values of this state are not on the device: {self.away}")
        return self._tensor

    def fetch(self, out: torch.Tensor, lane: Lane, *, start: int = 0) -> Ticket:
        lane.see_writes_so_far()
        job = lambda: _copy(out, self.view()[start : start + out.numel()])  # noqa: E731
        return transfer(lane, job, f"from {self.tier}", out.nbytes)

    def store(self, values: torch.Tensor, lane: Lane, *, start: int = 0) -> Ticket:
        lane.see_writes_so_far()
        job = lambda: _copy(self._tensor[start : start + values.numel()], values)  # noqa: E731
        return transfer(lane, job, f"to {self.tier}", values.nbytes)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


class DeviceHome(_InMemory):
    """Memory on the device that computes with the parameters: the tensor itself, at no cost."""

    tier = "device"


class HostHome(_InMemory):
    """Host memory for a tensor that is used on `device`; page-locked if that is a CUDA device.

    Raises:
        ZeroStateError: the operating system refuses the memory, or refuses to lock its pages.
    """

    tier = "host"

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, *, pin: bool = True) -> None:
        try:
            memory = (
                locked_empty(numel, dtype)
                if pin and device.type == "cuda"
                else torch.empty(numel, dtype=dtype, device="cpu")
            )
        except RuntimeError as error:
            raise ZeroStateError(
                f"host memory for {numel:,} elements ({numel * dtype.itemsize:,} bytes"
                f"{', page-locked' if pin else ''}) was refused: {error}; expected that much free memory"
                f"{', and page-locking allowed (`ulimit -l`): or set pin_memory to false' if pin else ''}"
            ) from error
        super().__init__(memory)
        self._arriving: tuple[Ticket, ...] = ()
        self.holds_up_copies = device.type == "cuda" and not pin
        """See `ring.FilledByThread`."""

    def view(self) -> torch.Tensor:
        """The elements. The host waits for stores that are under way: it reads the memory itself, so that a wait of a
        stream would not be enough.
        """
        # Two threads may ask at the same time (the step and the norm), so tickets stay until they were waited for. The
        # newest comes first: on a stream the others have ended by then.
        arriving = self._arriving
        for ticket in reversed(arriving):
            ticket.synchronize()
        if self._arriving is arriving:
            self._arriving = ()
        return self._tensor

    def store(self, values: torch.Tensor, lane: Lane, *, start: int = 0) -> Ticket:
        ticket = super().store(values, lane, start=start)
        self._arriving = (*self._arriving, ticket)
        return ticket

    def expect(self, ticket: Ticket) -> None:
        """See `ring.FilledByThread`."""
        torch.autograd.graph.increment_version(self._tensor)
        self._arriving = (*(earlier for earlier in self._arriving if not earlier.is_completed()), ticket)

    def to_fill(self, *, add: bool) -> tuple[torch.Tensor, None]:
        """See `ring.FilledByThread`. What is written is not counted as a write again."""
        del add
        return self._tensor.data, None

    def filled(self, values: torch.Tensor) -> None:
        """See `ring.FilledByThread`: the elements are where they belong."""
        del values

    def add(self, values: torch.Tensor, lane: Lane, *, seen: Callable[[torch.Tensor], object] | None = None) -> Ticket:
        """Add `values`, which are on a device, to all elements, as a job of `lane`. The device adds them: the elements
        travel there and back in pieces, so that the host waits for nothing and needs no other memory. `values` are
        overwritten with the sum, and given to `seen` in the job.
        """
        lane.see_writes_so_far()

        def job() -> None:
            self._add_on_device(values)
            if seen is not None:
                seen(values)

        ticket = transfer(lane, job, f"to {self.tier}", values.nbytes)
        # Backward after backward adds something, and nobody reads: what has ended by now need not be remembered.
        self._arriving = (*(earlier for earlier in self._arriving if not earlier.is_completed()), ticket)
        return ticket

    def _add_on_device(self, values: torch.Tensor) -> None:
        """The job of `add`. Earlier stores to these elements ran on the same lane."""
        piece = torch.empty(min(self.numel, _ADDED_AT_ONCE), dtype=self.dtype, device=values.device)
        for start in range(0, self.numel, _ADDED_AT_ONCE):
            here, there = self._tensor[start : start + _ADDED_AT_ONCE], values[start : start + _ADDED_AT_ONCE]
            earlier = piece[: here.numel()]
            _copy(earlier, here)
            _copy(here, there.add_(earlier))


_ADDED_AT_ONCE = 1 << 22
"""Elements that `HostHome.add` has on the device at a time, besides the values."""


_HOST_LANE = HostLane()
"""The lane of `read` and `write`, which wait at once."""


def read(home: Home, start: int = 0, stop: int | None = None, *, device: torch.device | None = None) -> torch.Tensor:
    """Elements [start, stop) for reading, on `device` (default: the home's device): a view if they are in memory there,
    otherwise a copy.
    """
    view = home.view()
    if view is not None:
        found = view[start:stop]
    else:
        numel = (home.numel if stop is None else stop) - start
        found = torch.empty(numel, dtype=home.dtype, device=home.device)
        home.fetch(found, _HOST_LANE, start=start).synchronize()
    return found if device is None else found.to(device)


def write(home: Home, values: torch.Tensor, start: int = 0) -> None:
    """Set the elements from `start` on to `values`, of any shape, dtype and device."""
    view, flat = home.view(), values.detach().reshape(-1)
    if view is not None:
        view[start : start + flat.numel()].copy_(flat)
    elif flat.numel():
        home.store(flat.to(device=home.device, dtype=home.dtype), _HOST_LANE, start=start).synchronize()


@contextmanager
def opened(home: Home, start: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
    """Inside the context: elements [start, stop), which can be changed in place. Where there is no view, changes are
    stored when the context ends without an error.
    """
    values = read(home, start, stop)
    yield values
    if home.view() is None:
        write(home, values, start)


def fetching(home: Home, device: torch.device, lane: Lane) -> Callable[[], torch.Tensor]:
    """A function that gives all elements on `device`, for a job of `lane`: the view if it is there, otherwise a copy.
    Reading from a slow place starts at once, and the function waits for it.

    The copy's memory is allocated by the function. So it belongs to the stream on which the job runs, and can be
    dropped there: memory of the caller's stream would go back to that stream while the job's copy and collective still
    use it.
    """
    view = home.view()
    if view is not None and view.device == device:
        return lambda: view
    if view is not None:
        return lambda: _copied(view, device, lane, f"from {home.tier}")
    if isinstance(home, ReadsAhead) and not home.is_direct:
        values, arriving = home.take()

        def arrived() -> torch.Tensor:
            arriving.wait()
            if values.device == device:
                return values
            copied = _copied(values, device)
            home.free_after_copy(values, device)
            return copied

        return arrived
    return lambda: _fetched_in_job(home, device)


def _copied(source: torch.Tensor, device: torch.device, lane: Lane | None = None, what: str = "") -> torch.Tensor:
    """A copy on `device`, from inside a job; if `lane` is given, its listener is told what it is."""
    out = torch.empty(source.shape, dtype=source.dtype, device=device)
    copy: Job = lambda: _copy(out, source)  # noqa: E731
    (copy if lane is None else told(lane, copy, what, out.nbytes))()
    return out


def _fetched_in_job(home: Home, device: torch.device) -> torch.Tensor:
    """A copy on `device`, from inside a job: what the home submits runs at once, on the job's stream."""
    out = torch.empty(home.numel, dtype=home.dtype, device=device)
    home.fetch(out, _HOST_LANE).wait()
    return out


def accumulate(
    home: Home, values: torch.Tensor, lane: Lane, *, seen: Callable[[torch.Tensor], object] | None = None
) -> Ticket:
    """Add `values` to all elements, as a job of `lane`, which may overwrite `values`. Do not write to them before you
    have waited for the ticket. The job calls `seen` with all elements after the addition, on the device of `values`
    or in memory.
    """
    if isinstance(home, HostHome) and values.device.type != "cpu":
        return home.add(values, lane, seen=seen)
    lane.see_writes_so_far()

    def add() -> None:
        with opened(home) as total:
            total.add_(values.to(total.device))
            if seen is not None:
                seen(total)

    return transfer(lane, add, f"to {home.tier}", values.nbytes)


def block_norm(block: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The L2 norm of `block`: a 0-dim tensor on its device, fp32 (fp64 for a block of fp64), in `out` if given."""
    if block.dtype.itemsize < 4:
        return torch.linalg.vector_norm(block, dtype=torch.float32, out=out)
    return torch.linalg.vector_norm(block, out=out)
