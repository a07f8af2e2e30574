"""Homes in a `TensorStore`: named tensors on disk, or wherever the store keeps them.

`dsx_nvme.TensorStore` is one; dsx_zero does not import it, `dsx` hands it in. A store reads and writes whole tensors by
name. A home therefore lies in it as pieces of one size, so that a sub-group of the optimizer's step is read and written
without the rest. A range that is not a piece is copied through a piece in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        piece: elements of a piece.
    """

    tier = "disk"
    device = torch.device("cpu")

    def __init__(self, store: TensorStore, name: str, numel: int, dtype: torch.dtype, *, piece: int) -> None:
        if piece < 1:
            raise ValueError(f"piece: got {piece}, expected at least one element")
        self._store, self._name, self._piece = store, name, piece
        self.numel, self.dtype = numel, dtype

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
        lane.follow()
        return lane.submit(lambda: self._write(values, start))

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, str]]:
        """The pieces that have elements of [start, stop)."""
        for number in range(start // self._piece, -(-stop // self._piece)):
            begin = number * self._piece
            yield begin, min(begin + self._piece, self.numel), f"{self._name}.{number}"

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
        return tensor.device.type == "cpu" and tensor.dtype == self.dtype and tensor.is_contiguous()
