"""Homes in a `TensorStore`: named tensors on disk, or wherever the store keeps them.

`dsx_nvme.TensorStore` is one; dsx_zero does not import it, `dsx` hands it in. A store reads and writes whole tensors by
name. A home therefore lies in it as pieces, cut where parameters begin (`cut_at`) and after so many elements, so that
what the optimizer's step reads and writes is whole pieces. A range that is not is copied through pieces in host memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Protocol

import torch

from ..lanes import Lane, Pending, Ticket

__all__ = ["StoredHome", "TensorStore"]


class TensorStore(Protocol):
    """Tensors by name, put and taken while a program runs. Operations on one name keep their order."""

    def __contains__(self, name: str) -> bool: ...

    def put(self, name: str, tensor: torch.Tensor) -> Pending:
        """Start storing a host tensor; it must not be written to before it is waited for."""
        ...

    def get(self, name: str, out: torch.Tensor | None = None) -> Pending:
        """Start reading into `out` (host memory, of the stored dtype and number of elements)."""
        ...

    def delete(self, name: str) -> None:
        """Forget a tensor that is stored; its room is used again."""
        ...


class _Moves:
    """Several transfers under way, and copies to be made when they have arrived."""

    def __init__(self) -> None:
        self._steps: list[tuple[Pending, torch.Tensor | None, torch.Tensor | None]] = []

    def add(self, pending: Pending, target: torch.Tensor | None = None, source: torch.Tensor | None = None) -> None:
        self._steps.append((pending, target, source))

    def wait(self) -> None:
        steps, self._steps = self._steps, []
        for pending, target, source in steps:
            pending.wait()
            if target is not None and source is not None:
                target.copy_(source)


class StoredHome:
    """A flat tensor in a store.

    Args:
        store: where.
        name: the beginning of its pieces' names; no other home of the store has it.
        piece: elements of a piece, at most.
        pin: what is read ahead lies in page-locked memory.
    """

    tier = "disk"
    device = torch.device("cpu")

    def __init__(
        self, store: TensorStore, name: str, numel: int, dtype: torch.dtype, *, piece: int, pin: bool = False
    ) -> None:
        if piece < 1:
            raise ValueError(f"piece: got {piece}, expected at least one element")
        self._store, self._name, self._piece, self._pin = store, name, piece, pin
        self._direct = bool(getattr(store, "reaches_device", False))
        """The store reads into device memory and writes from it: nothing goes through host memory on the way."""
        self.numel, self.dtype = numel, dtype
        self._starts: list[int] = []
        self.cut_at(())
        self._ahead: tuple[torch.Tensor, _Moves] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces that were stored."""
        return sum((b - a) * self.dtype.itemsize for a, b, key in self._pieces(0, self.numel) if key in self._store)

    def view(self) -> None:
        """It is not in the memory of this process."""
        return None

    def fetch(self, out: torch.Tensor, lane: Lane, *, start: int = 0) -> Ticket:
        return lane.submit(lambda: self._read(out, start))

    def store(self, values: torch.Tensor, lane: Lane, *, start: int = 0) -> Ticket:
        self.forget_ahead()
        lane.follow()
        return lane.submit(lambda: self._write(values, start))

    # Reading ahead ----------------------------------------------------------------------------------------------------

    def read_ahead(self) -> None:
        """Start reading everything into host memory, for a `take` soon; nothing if that is under way, or if host
        memory is passed by.
        """
        if self._ahead is None and not self._direct:
            out = torch.empty(self.numel, dtype=self.dtype, device="cpu", pin_memory=self._pin)
            self._ahead = out, self._read(out, 0)

    @property
    def is_ahead(self) -> bool:
        """Was it read ahead, and not taken yet?"""
        return self._ahead is not None

    @property
    def is_direct(self) -> bool:
        """Does what is fetched pass host memory by, so that the host does not wait for it?"""
        return self._direct

    def take(self, device: torch.device, lane: Lane) -> tuple[torch.Tensor, Ticket] | None:
        """What was read ahead, on `device`, with the ticket to wait for; None where nothing was."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        values, moves = ahead
        if device.type == "cpu":
            return values, lane.submit(lambda: moves)
        out = torch.empty(self.numel, dtype=self.dtype, device=device)

        def copy() -> None:
            moves.wait()
            out.copy_(values, non_blocking=True)

        return out, lane.submit(copy)

    def forget_ahead(self) -> None:
        """What was read ahead is stale, or not wanted."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].wait()  # the buffer must not go while it is being filled

    def discard(self) -> None:
        """Give the room in the store back."""
        self.forget_ahead()
        for _, _, key in self._pieces(0, self.numel):
            if key in self._store:
                self._store.delete(key)

    def cut_at(self, places: Iterable[int]) -> None:
        """Let pieces begin at these elements. Only before anything is stored."""
        bounds = sorted({0, self.numel, *(place for place in places if 0 < place < self.numel)})
        starts = [at for begin, end in pairwise(bounds) for at in range(begin, end, self._piece)]
        if self._starts and self.nbytes:
            raise ValueError(f"{self._name}: has values already; it is cut before they are stored")
        self._starts = starts

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, str]]:
        """The pieces that have elements of [start, stop)."""
        starts = self._starts
        number = max(0, bisect_right(starts, start) - 1)
        while number < len(starts) and starts[number] < stop:
            end = starts[number + 1] if number + 1 < len(starts) else self.numel
            yield starts[number], end, f"{self._name}.{number}"
            number += 1

    def _read(self, out: torch.Tensor, start: int) -> _Moves:
        moves, stop = _Moves(), start + out.numel()
        for begin, end, key in self._pieces(start, stop):
            first, last = max(begin, start), min(end, stop)
            target = out[first - start : last - start]
            if key not in self._store:
                target.zero_()
            elif (first, last) == (begin, end) and self._fits(out):
                moves.add(self._store.get(key, target))
            else:
                piece = torch.empty(end - begin, dtype=self.dtype)
                moves.add(self._store.get(key, piece), target, piece[first - begin : last - begin])
        return moves

    def _write(self, values: torch.Tensor, start: int) -> _Moves:
        moves, stop = _Moves(), start + values.numel()
        for begin, end, key in self._pieces(start, stop):
            first, last = max(begin, start), min(end, stop)
            source = values[first - start : last - start]
            if (first, last) == (begin, end) and self._fits(values):
                moves.add(self._store.put(key, source))
                continue
            piece = torch.zeros(end - begin, dtype=self.dtype)
            if (first, last) != (begin, end) and key in self._store:
                self._store.get(key, piece).wait()
            piece[first - begin : last - begin].copy_(source)
            moves.add(self._store.put(key, piece))
        return moves

    def _fits(self, tensor: torch.Tensor) -> bool:
        """Can the store read into it and write from it?"""
        reached = tensor.device.type == "cpu" or self._direct
        return reached and tensor.dtype == self.dtype and tensor.is_contiguous()
