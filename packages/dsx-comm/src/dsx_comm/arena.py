"""`SymmetricArena`: symmetric memory for tensors that come and go.

Making symmetric memory is collective, so it cannot be made for a tensor that only one rank needs now. But in a
collective the ranks' tensors may lie at different offsets of one memory. So the ranks make one memory together, and
each rank takes tensors from its own part without asking the others. The memory is address space: a page exists from the
first write to it until `trim`, and existing pages are used again before new ones are touched. Where the ranks of the
group share no memory, and where the arena is full, a tensor is an ordinary one; collectives work all the same.

Left out: device memory (`empty` has torch's), and finding out by itself that a tensor is not used any more.
"""

from __future__ import annotations

import bisect
import logging
import mmap
from math import prod
from typing import Any

import torch

from .errors import CommArgumentError
from .groups import member
from .shm.memory import map_parts
from .shm.process_group import ShmProcessGroup
from .symmetric import shape_of

__all__ = ["SymmetricArena"]

_PAGE = mmap.PAGESIZE
_log = logging.getLogger(__name__)


class Ranges:
    """Ranges of [0, size): taken first fit, so that few pages are touched, and merged with their neighbours when given
    back.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.free = [(0, size)] if size else []
        self._taken: dict[int, int] = {}

    @property
    def end(self) -> int:
        """The end of the last taken range."""
        return self.free[-1][0] if self.free and self.free[-1][1] == self._size else self._size

    def take(self, length: int) -> int | None:
        """Take a range of `length` and return its begin; None if there is no room."""
        for place, (begin, end) in enumerate(self.free):
            if end - begin >= length:
                self.free[place : place + 1] = [(begin + length, end)] if end - begin > length else []
                self._taken[begin] = begin + length
                return begin
        return None

    def give(self, begin: int) -> None:
        """Hand a range back. Raises KeyError if none that is taken begins there."""
        end = self._taken.pop(begin)
        place = bisect.bisect(self.free, (begin, end))
        first = last = place
        if place and self.free[place - 1][1] == begin:
            first, begin = place - 1, self.free[place - 1][0]
        if place < len(self.free) and self.free[place][0] == end:
            last, end = place + 1, self.free[place][1]
        self.free[first:last] = [(begin, end)]


class SymmetricArena:
    """`nbytes` bytes of symmetric memory on every rank of `group` (None: the default group) to take host tensors from.
    Collective.

    Args:
        nbytes: the same on every rank. Address space, of which each tensor takes whole pages (`space`).
        group: whose collectives find the tensors where they lie.

    Raises:
        CommArgumentError: a negative size.
        SymmetricMemoryError: the memory cannot be had (on all ranks, naming the first that failed).
    """

    def __init__(self, nbytes: int, *, group: Any = None) -> None:
        if nbytes < 0:
            raise CommArgumentError(f"nbytes: got {nbytes}, expected at least 0")
        to = member(group)
        shares = nbytes and isinstance(to.group, ShmProcessGroup) and to.size > 1
        size = self.space(nbytes) if shares else 0
        self._mapping: mmap.mmap | None = None
        self._begin = self._base = 0
        if shares:
            self._mapping, self._begin = map_parts(to.group, size, populate=False)
            self._base = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr() + self._begin
        self._size = size
        self._ranges = Ranges(size)
        self._touched = 0  # no page beyond this byte has been used since it was returned

    @staticmethod
    def space(nbytes: int) -> int:
        """The bytes that a tensor of `nbytes` takes of an arena: whole pages."""
        return -(-nbytes // _PAGE) * _PAGE

    def take(self, *size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor of `size` (as for torch.empty), with a storage of its own; ordinary where there is no
        room. Not collective.

        Raises CommArgumentError for a negative size.
        """
        shape = shape_of(size)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        numel = prod(shape)
        length = self.space(numel * dtype.itemsize)
        begin = self._ranges.take(length) if length else None
        if begin is None or self._mapping is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        self._touched = max(self._touched, begin + length)
        return torch.frombuffer(self._mapping, dtype=dtype, offset=self._begin + begin, count=numel).view(shape)

    def give(self, tensor: torch.Tensor) -> None:
        """Hand back a tensor that `take` gave. It may not be used any more, and collectives on it have ended. One that
        had no room is just dropped.

        Raises CommArgumentError if it is part of the arena but none that is taken begins there: given back before, or a
        view.
        """
        at = tensor.data_ptr() - self._base
        if not tensor.numel() or not 0 <= at < self._size:
            return
        try:
            self._ranges.give(at)
        except KeyError:
            raise CommArgumentError(
                f"got a tensor at byte {at} of the arena, where none that is taken begins; "
                "give each tensor of take() back once"
            ) from None

    def trim(self, *, keep: int = 0) -> None:
        """Return the pages of what is free to the system, but for those of the first `keep` bytes.

        A page that is new costs much more time than one that was kept: 0.6 to 1 ms per MB where we measured it.
        """
        lowest = keep // _PAGE * _PAGE
        for begin, end in self._touched_and_free():
            begin = max(begin, lowest)
            if begin < end and not _remove(self._mapping, self._begin + begin, end - begin):
                return
        self._touched = max(self._ranges.end, min(self._touched, lowest))

    def idle_bytes(self) -> int:
        """Bytes of what is free and may have pages."""
        return sum(end - begin for begin, end in self._touched_and_free())

    def _touched_and_free(self) -> list[tuple[int, int]]:
        return [(begin, min(end, self._touched)) for begin, end in self._ranges.free if begin < self._touched]


def _remove(mapping: mmap.mmap | None, begin: int, length: int) -> bool:
    """Give pages back; they read as zeros then, and come with the next write."""
    if mapping is None:
        return False
    try:
        mapping.madvise(mmap.MADV_REMOVE, begin, length)
    except OSError as error:  # a system without holes in memory files
        _log.info("the arena keeps its idle pages: %s", error)
        return False
    return True
