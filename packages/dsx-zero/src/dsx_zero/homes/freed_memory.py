"""Freed host memory: the operating system gets it in processes whose state is offloaded, and the next blocks get it in
pipelines on a CPU.

glibc asks the kernel for memory for large blocks and returns it when they are freed. But it raises the size from which
on a block is large (`M_MMAP_THRESHOLD`) up to 32 MiB when such blocks are freed. Blocks of a few MiB, which offload
allocates and frees all the time (staging memory, gathered units, gradients), come from the heap then. Small blocks that
live on lie between them, so that the heap keeps growing, and resident memory exceeds the states that were moved to
disk (`test_zero_resident_memory`).

Setting the threshold stops glibc from raising it. The price is that the kernel clears the pages of each new block.

What the heap already holds stays there and is used first, so this is called before offload allocates.

A pipeline on a CPU is the other way round: what it keeps between a forward and its backward is freed and allocated in
every micro-batch. Where the upper end of the heap is free for a moment glibc returns it, and the kernel clears the same
pages again: 13,000 of them in one backward in two parts of five blocks of width 448, a tenth of its time.

Left out: other allocators (jemalloc, tcmalloc), which return freed memory on their own.
"""

from __future__ import annotations

import ctypes
import functools
import os

__all__ = ["keep_freed_blocks", "keep_heap_small"]

SWITCH = "DSX_RETURN_FREED_MEMORY"
_THRESHOLD = 128 << 10
"""Bytes: the value with which glibc starts. With 1 MiB the heap grows with units of 576 KiB."""
_MOST_OF_HEAP = 32 << 20
"""Bytes: up to here glibc would raise the threshold by itself."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")
_OWN_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold", "glibc.malloc.mmap_max")


@functools.cache
def keep_heap_small() -> bool:
    """Make malloc return blocks of 128 KiB and more when they are freed, from now on, in the whole process.

    Returns False, and changes nothing, without glibc, where the environment variable ``DSX_RETURN_FREED_MEMORY`` is 0,
    or where the user has set glibc's thresholds in the environment.
    """
    library = _glibc()
    if library is None:
        return False
    found = [library.mallopt(option, _THRESHOLD) for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)]
    return all(found)


@functools.cache
def keep_freed_blocks() -> bool:
    """Make malloc keep what is freed, but for blocks of more than 32 MiB, from now on, in the whole process.

    Returns False, and changes nothing, where `keep_heap_small` would, or where it has been called: memory is short.
    """
    library = None if keep_heap_small.cache_info().currsize else _glibc()
    if library is None:
        return False
    return all(library.mallopt(*one) for one in ((_M_MMAP_THRESHOLD, _MOST_OF_HEAP), (_M_TRIM_THRESHOLD, 2**31 - 1)))


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc and its settings are left to us."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    set_by_user = any(name in os.environ for name in _OWN_SETTINGS) or any(name in tunables for name in _OWN_TUNABLES)
    if os.environ.get(SWITCH) == "0" or set_by_user:
        return None
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):  # not Unix, or another C library
        return None
    return ctypes.CDLL(None) if version and version.startswith("glibc") else None
