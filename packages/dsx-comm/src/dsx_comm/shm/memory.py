"""Symmetric memory: tensors that every rank of the host can address.

A gather of such a tensor reads the peers' shards straight into its destination, a reduce-scatter or all-reduce sums the
peers' tensors where they lie. Making it is collective, and each call makes memory of its own (nothing is ever re-used,
so the order in which ranks drop their tensors does not matter): take one large tensor and cut views from it, or an
arena (`arena.py`).
"""

from __future__ import annotations

import bisect
import mmap
import os
import weakref
from operator import attrgetter
from typing import Any

import torch

from ..errors import SymmetricMemoryError
from .segment import Unavailable, fetch, serve

_ALIGN = 4096
_PATIENCE = 60.0
_begin = attrgetter("begin")


class Memory:
    """The addresses of one allocation: all ranks' parts, and this rank's part of it. Does not keep it alive."""

    def __init__(self, number: int, mapping: mmap.mmap, stride: int, rank: int, size: int) -> None:
        self.number = number
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        self.bases = [whole.data_ptr() + r * stride for r in range(size)]
        self.begin = self.bases[rank]
        self.end = self.begin + stride


class Memories:
    """The symmetric memory of one group, found again by address."""

    def __init__(self) -> None:
        self._items: tuple[
            Memory, ...
        ] = ()  # by address; replaced whole, because a tensor may die in the middle of a search
        self.made = 0

    def __bool__(self) -> bool:
        return bool(self._items)

    def add(self, memory: Memory) -> None:
        """Note a new allocation."""
        self._items = tuple(sorted((*self._items, memory), key=_begin))

    def remove(self, memory: Memory) -> None:
        """Forget an allocation."""
        self._items = tuple(m for m in self._items if m is not memory)

    def find(self, tensor: torch.Tensor) -> tuple[int, int, list[int]]:
        """(number of the allocation, offset, every rank's base); (-1, 0, []) for ordinary memory."""
        items, address = self._items, tensor.data_ptr()
        at = bisect.bisect(items, address, key=_begin) - 1
        if at < 0 or address >= items[at].end:
            return -1, 0, []
        memory = items[at]
        return memory.number, address - memory.begin, memory.bases


def allocate(group: Any, nbytes: int) -> torch.Tensor:
    """This rank's part of new symmetric memory, `nbytes` bytes on every rank, as uint8. Collective.

    Raises SymmetricMemoryError on all ranks if it cannot be had, or if ranks ask for different sizes.
    """
    mapping, begin = map_parts(group, nbytes, populate=True)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=begin, count=nbytes or 1)[:nbytes]


def map_parts(group: Any, nbytes: int, *, populate: bool) -> tuple[mmap.mmap, int]:
    """All ranks' parts of new symmetric memory and where this rank's begins: it is memory of the group for as long as
    the mapping lives.

    With `populate` its pages exist at once; otherwise they come with the first write, as those of ordinary memory do.
    Collective; raises as `allocate`.
    """
    rank, size = group.rank(), group.size()
    stride = max(_ALIGN, -(-nbytes // _ALIGN) * _ALIGN)
    problem, mapping, fd = "", None, -1
    try:
        fd = _make(group, stride, size) if rank == 0 else _get(group, stride)
        if populate:
            os.posix_fallocate(fd, rank * stride, stride)
        mapping = mmap.mmap(fd, stride * size)
    except (OSError, OverflowError, Unavailable) as error:
        problem = f"rank {rank}: {error}"
    finally:
        if fd >= 0:
            os.close(fd)
    problems: list[Any] = [None] * size
    _all_gather_text(group, problem, problems)
    problem = next((p for p in problems if p), "")
    if problem or mapping is None:
        raise SymmetricMemoryError(f"no symmetric memory of {nbytes} bytes per rank: {problem}")
    memories = group.memories
    memories.made += 1
    memory = Memory(memories.made, mapping, stride, rank, size)
    memories.add(memory)
    weakref.finalize(mapping, memories.remove, memory)  # the tensors hold the mapping, nothing else does
    return mapping, rank * stride


def _make(group: Any, stride: int, size: int) -> int:
    fd = -1
    try:
        fd = os.memfd_create("dsx-comm-symmetric")
        os.ftruncate(fd, stride * size)
    except (OSError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        _broadcast_text(group, f"- {error}")  # the others wait for a name
        raise
    serve(fd, size - 1, lambda name: _broadcast_text(group, f"{name} {stride}"), _PATIENCE)
    return fd


def _get(group: Any, stride: int) -> int:
    name, wanted = _broadcast_text(group, "").split(" ", 1)
    if name == "-":
        raise Unavailable(f"rank 0 could not make it: {wanted}")
    fd = fetch(name, _PATIENCE)
    if int(wanted) != stride:
        os.close(fd)
        raise Unavailable(f"ranks ask for different sizes: {stride} bytes (rounded up), rank 0 {wanted}")
    return fd


_TEXT = 512


def _broadcast_text(group: Any, text: str) -> str:
    line = torch.zeros(_TEXT, dtype=torch.uint8, device="cpu")
    data = text.encode()[:_TEXT]
    line[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
    group.broadcast([line]).wait()
    return bytes(line.tolist()).rstrip(b"\0").decode()


def _all_gather_text(group: Any, text: str, out: list[Any]) -> None:
    line = torch.zeros(_TEXT, dtype=torch.uint8, device="cpu")
    data = text.encode()[:_TEXT]
    line[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
    rows = torch.empty(group.size(), _TEXT, dtype=torch.uint8, device="cpu")
    group.all_gather_single(rows, line).wait()
    out[:] = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
