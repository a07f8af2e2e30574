"""The memory that PyTorch's caching allocator of a CUDA device reserves: the same requests, in the same order, given to
a small copy of its rules.

The rules (torch/csrc/cuda and "CUDA semantics, memory management" of PyTorch's documentation): sizes are rounded up to
512 bytes. Requests up to 1 MiB are served from blocks of 2 MiB, requests below 10 MiB from blocks of 20 MiB, larger
ones from blocks of their own, rounded up to 2 MiB. The best fitting free block is split where enough is left. Free
neighbours are joined. Blocks are given back to the device only when it is full, which is not modelled: what is held is
then an upper bound.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

__all__ = ["CachingAllocator", "fragmentation"]

_ROUND, _SMALL, _SMALL_BLOCK = 512, 1 << 20, 2 << 20
_LARGE, _LARGE_BLOCK, _LARGE_ROUND = 10 << 20, 20 << 20, 2 << 20


class _Block:
    __slots__ = ("after", "before", "free", "nbytes", "small")

    def __init__(self, nbytes: int, small: bool) -> None:
        self.nbytes, self.small, self.free = nbytes, small, False
        self.before: _Block | None = None
        self.after: _Block | None = None


class CachingAllocator:
    """A copy of the rules by which PyTorch's caching allocator asks a CUDA device for memory.

    `held` is what the device has given, `peak` the most that it held.
    """

    def __init__(self) -> None:
        self.held = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._number = 0

    def take(self, nbytes: int) -> _Block:
        """Serve a request."""
        size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        small = size <= _SMALL
        pool = self._free[small]
        place = bisect.bisect_left(pool, (size, -1))
        if place < len(pool):
            _, _, block = pool.pop(place)
        else:
            block = _Block(self._block_size(size, small), small)
            self.held += block.nbytes
        block.free = False
        rest = block.nbytes - size
        if rest >= _ROUND if small else rest > _SMALL:
            left = _Block(rest, small)
            block.nbytes = size
            left.before, left.after, block.after = block, block.after, left
            if left.after is not None:
                left.after.before = left
            self._add(left)
        return block

    def give(self, block: _Block) -> None:
        """Take a block back."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._remove(neighbour)
                block = self._joined(block, neighbour)
        self._add(block)

    @staticmethod
    def _block_size(size: int, small: bool) -> int:
        if small:
            return _SMALL_BLOCK
        return _LARGE_BLOCK if size < _LARGE else -(-size // _LARGE_ROUND) * _LARGE_ROUND

    @staticmethod
    def _joined(block: _Block, neighbour: _Block) -> _Block:
        first, second = (neighbour, block) if block.before is neighbour else (block, neighbour)
        first.nbytes += second.nbytes
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first

    def _add(self, block: _Block) -> None:
        block.free = True
        self._number += 1
        bisect.insort(self._free[block.small], (block.nbytes, self._number, block))

    def _remove(self, block: _Block) -> None:
        pool = self._free[block.small]
        place = bisect.bisect_left(pool, (block.nbytes, -1))
        while pool[place][2] is not block:
            place += 1
        del pool[place]
        block.free = False


def fragmentation(requests: Sequence[tuple[int, int]]) -> int:
    """Bytes that the allocator holds beyond the most that is in use at one time.

    Args:
        requests: number of a piece of memory and its bytes, 0 where it is given back, in order.
    """
    allocator, held = CachingAllocator(), dict[int, tuple[_Block, int]]()
    in_use = most = 0
    for number, nbytes in requests:
        if number in held:
            block, size = held.pop(number)
            allocator.give(block)
            in_use -= size
        if nbytes:
            held[number] = allocator.take(nbytes), nbytes
            in_use += nbytes
            most = max(most, in_use)
    return allocator.held - most
