"""Homes in a `TensorStore`: named tensors on disk, or wherever the store keeps them.

`dsx_nvme.TensorStore` is such a store; dsx_zero does not import it, its caller passes it in. A store reads and writes
complete tensors by name. Therefore a home is kept as several tensors (pieces). They are cut where parameters begin
(`cut_at`) and have a largest size, so that the optimizer's step reads and writes complete pieces. For any other range,
the pieces around it go through host memory.

The step of units during backward calls the store from a thread of its own. Stores allow one caller at a time, so the
homes of one model share an `OneCallerAtATime` around theirs.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Protocol

import torch
from dsx_comm.lanes import Lane, Pending, Ticket, is_done
from dsx_core.device import Device

from .blocks import HostBlocks

__all__ = ["OneCallerAtATime", "StoredHome", "TensorStore"]


class TensorStore(Protocol):
    """Stores tensors by name while a program runs. Operations on the same name keep their order."""

    def __contains__(self, name: str) -> bool: ...

    def put(self, name: str, tensor: torch.Tensor) -> Pending:
        """Start storing a host tensor. Do not write to it before you have waited."""
        ...

    def get(self, name: str, out: torch.Tensor | None = None) -> Pending:
        """Start reading into `out` (host memory, of the stored dtype and number of elements)."""
        ...

    def delete(self, name: str) -> None:
        """Delete a stored tensor; its space is used again."""
        ...


class OneCallerAtATime:
    """A `TensorStore` that several threads may call; their calls run one after the other. Transfers are waited for
    outside of the calls, so that a thread which waits holds up no other.

    Args:
        store: the store. Nothing else may call it from another thread.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store, self._lock = store, threading.RLock()
        self.reaches_device = bool(getattr(store, "reaches_device", False))
        """Whether the store reads into device memory and writes from it without a copy in host memory."""

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._store

    def put(self, name: str, tensor: torch.Tensor) -> Pending:
        """See `TensorStore.put`."""
        with self._lock:
            return self._store.put(name, tensor)

    def get(self, name: str, out: torch.Tensor | None = None) -> Pending:
        """See `TensorStore.get`."""
        with self._lock:
            return self._store.get(name, out)

    def delete(self, name: str) -> None:
        """See `TensorStore.delete`."""
        with self._lock:
            self._store.delete(name)


class _Moves:
    """Several transfers that are under way, and copies to make after they have ended. Several threads may wait."""

    def __init__(self) -> None:
        self._steps: list[tuple[Pending, torch.Tensor | None, torch.Tensor | None]] = []
        self._waiting = threading.Lock()

    def add(self, pending: Pending, target: torch.Tensor | None = None, source: torch.Tensor | None = None) -> None:
        """`source` is kept until `wait`, and copied to `target`, if there is one."""
        self._steps.append((pending, target, source))

    def done(self) -> bool:
        """Have all transfers ended, so that `wait` has only copies to make?"""
        return all(is_done(pending) for pending, _, _ in self._steps)

    def wait(self) -> None:
        with self._waiting:  # no thread returns while another one still waits
            try:
                for pending, target, source in self._steps:
                    pending.wait()
                    if target is not None and source is not None:
                        target.copy_(source)
            finally:
                self._steps = []  # only now: until then `done` is not true for another thread


class StoredHome:
    """A flat tensor in a store.

    Args:
        store: the store.
        name: the beginning of its pieces' names; no other home in the store has it.
        piece: the most elements of a piece.
        pin: elements that are read ahead go into page-locked memory.
        blocks: memory for elements that are in host memory for a while; None: blocks of its own.
    """

    tier = "disk"
    device = torch.device("cpu")

    def __init__(
        self,
        store: TensorStore,
        name: str,
        numel: int,
        dtype: torch.dtype,
        *,
        piece: int,
        pin: bool = False,
        blocks: HostBlocks | None = None,
    ) -> None:
        if piece < 1:
            raise ValueError(f"piece: got {piece}, expected at least one element")
        self._store, self._name, self._piece, self._pin = store, name, piece, pin
        self._blocks = HostBlocks() if blocks is None else blocks
        self._direct = bool(getattr(store, "reaches_device", False))
        """Whether the store reads into device memory and writes from it without a copy in host memory."""
        self.numel, self.dtype = numel, dtype
        self.writes = 0
        """Grows with every `store`, as the version of a tensor does with every write."""
        self._starts: list[int] = []
        self._second: set[int] = set()
        """Pieces whose values are under their second name."""
        self._beside: set[int] | None = None
        """While values are held: the pieces that were written beside them."""
        self.cut_at(())
        self._ahead: tuple[torch.Tensor, _Moves] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces that were stored."""
        return sum(
            (b - a) * self.dtype.itemsize for a, b, n in self._pieces(0, self.numel) if self._at(n) in self._store
        )

    def view(self) -> None:
        """Returns None: the elements are not in the memory of this process."""
        return None

    def fetch(self, out: torch.Tensor, lane: Lane, *, start: int = 0) -> Ticket:
        lane.see_writes_so_far()  # the memory of `out` may have had another user on the caller's side
        return lane.submit(lambda: self._read(out, start))

    def store(self, values: torch.Tensor, lane: Lane, *, start: int = 0) -> Ticket:
        self.forget_ahead()
        self.writes += 1
        lane.see_writes_so_far()
        return lane.submit(lambda: self._write(values, start))

    # Filled by a thread -----------------------------------------------------------------------------------------------

    @property
    def holds_up_copies(self) -> bool:
        """See `ring.FilledByThread`. A store that takes calls of one thread only is left to that thread."""
        return not self._direct and isinstance(self._store, OneCallerAtATime)

    def expect(self, ticket: Ticket) -> None:
        """See `ring.FilledByThread`. Who reads has to wait for the ticket himself."""
        del ticket
        self.forget_ahead()
        self.writes += 1

    def to_fill(self, *, add: bool) -> tuple[torch.Tensor, Pending | None]:
        """See `ring.FilledByThread`."""
        values = self._blocks.empty(self.numel, self.dtype)
        return values, self._read(values, 0) if add else None

    def filled(self, values: torch.Tensor) -> Pending:
        """See `ring.FilledByThread`: start to store the elements."""
        return self._write(values, 0)

    # Reading ahead ----------------------------------------------------------------------------------------------------

    def read_ahead(self) -> None:
        """Start reading all elements into host memory, for a `take` soon. Does nothing if that is under way, or if the
        store reads straight into device memory.
        """
        if self._ahead is None and not self._direct:
            self._ahead = self._start_reading()

    def _start_reading(self) -> tuple[torch.Tensor, _Moves]:
        out = self._blocks.empty(self.numel, self.dtype, pin=self._pin)
        return out, self._read(out, 0)

    @property
    def is_ahead(self) -> bool:
        """Was it read ahead, but not taken yet?"""
        return self._ahead is not None

    @property
    def is_direct(self) -> bool:
        """Do fetches go straight to the device, so that the host does not wait for them?"""
        return self._direct

    def take(self) -> tuple[torch.Tensor, Pending]:
        """All elements in host memory, and what to wait for: those that were read ahead, or reading starts now."""
        ahead, self._ahead = self._ahead or self._start_reading(), None
        return ahead

    def free_after_copy(self, values: torch.Tensor, device: torch.device) -> None:
        """See `ReadsAhead`."""
        self._blocks.keep_until(Device.of(device).event(), values)

    def forget_ahead(self) -> None:
        """Drop the elements that were read ahead: they are stale, or not wanted."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].wait()  # the buffer must not be freed while it is being filled

    # Holding values --------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Until `settle` the present values stay and are read, and what is stored is written beside them. It takes the
        same space once more, which the next such time uses again. Calling it twice is harmless.
        """
        if self._beside is None:
            self._beside = set()

    def settle(self, *, keep: bool) -> None:
        """End what `hold` began, after every `store` has ended. `keep`: what was stored takes the place of the values
        that were held; otherwise it is forgotten. Does nothing where nothing is held.
        """
        beside, self._beside = self._beside, None
        if beside and keep:
            self.forget_ahead()
            self._second ^= beside

    def discard(self) -> None:
        """Delete the pieces from the store."""
        self.forget_ahead()
        for number in range(len(self._starts)):
            for key in (self._key(number, second=False), self._key(number, second=True)):
                if key in self._store:
                    self._store.delete(key)

    def cut_at(self, places: Iterable[int]) -> None:
        """Let pieces begin at these elements. Must be called before anything is stored."""
        bounds = sorted({0, self.numel, *(place for place in places if 0 < place < self.numel)})
        starts = [at for begin, end in pairwise(bounds) for at in range(begin, end, self._piece)]
        if self._starts and self.nbytes:
            raise ValueError(f"{self._name}: has values already; it is cut before they are stored")
        self._starts = starts

    def _key(self, number: int, *, second: bool) -> str:
        return f"{self._name}.{number}{'.second' if second else ''}"

    def _at(self, number: int) -> str:
        """The name of a piece's values."""
        return self._key(number, second=number in self._second)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The pieces that have elements of [start, stop): begin, end and number."""
        starts = self._starts
        number = max(0, bisect_right(starts, start) - 1)
        while number < len(starts) and starts[number] < stop:
            end = starts[number + 1] if number + 1 < len(starts) else self.numel
            yield starts[number], end, number
            number += 1

    def _read(self, out: torch.Tensor, start: int) -> _Moves:
        moves, stop = _Moves(), start + out.numel()
        for begin, end, number in self._pieces(start, stop):
            key = self._at(number)
            first, last = max(begin, start), min(end, stop)
            target = out[first - start : last - start]
            if key not in self._store:
                target.zero_()
            elif (first, last) == (begin, end) and self._fits(out):
                moves.add(self._store.get(key, target))
            else:
                piece = self._blocks.empty(end - begin, self.dtype)
                moves.add(self._store.get(key, piece), target, piece[first - begin : last - begin])
        return moves

    def _write(self, values: torch.Tensor, start: int) -> _Moves:
        moves, stop = _Moves(), start + values.numel()
        if not self._fits(values):  # copied at once: from a device, the host would wait for each piece
            values = values.to(device=self.device, dtype=self.dtype).contiguous()
        for begin, end, number in self._pieces(start, stop):
            key = earlier = self._at(number)
            if self._beside is not None:
                key = self._key(number, second=number not in self._second)
                earlier = key if number in self._beside else earlier
                self._beside.add(number)
            first, last = max(begin, start), min(end, stop)
            source = values[first - start : last - start]
            if (first, last) == (begin, end):
                moves.add(self._store.put(key, source), None, source)
                continue
            piece = torch.zeros(end - begin, dtype=self.dtype, device="cpu")
            if earlier in self._store:
                self._store.get(earlier, piece).wait()
            piece[first - begin : last - begin].copy_(source)
            moves.add(self._store.put(key, piece), None, piece)
        return moves

    def _fits(self, tensor: torch.Tensor) -> bool:
        """Can the store read into this tensor and write from it?"""
        reached = tensor.device.type == "cpu" or self._direct
        return reached and tensor.dtype == self.dtype and tensor.is_contiguous()
