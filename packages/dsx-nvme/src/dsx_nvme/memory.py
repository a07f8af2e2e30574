"""Host memory that devices access without a copy: page-aligned, optionally page-locked, in huge pages where possible.

torch aligns its CPU memory to 64 bytes; direct I/O usually needs 512 or 4096. Tensors made here are always aligned.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .errors import NvmeError, OptionError

Pin = Literal["auto", True, False]
HUGE = 2 << 20


@dataclass(frozen=True)
class Locked:
    """The way memory is page-locked: by "cuda", by "mlock", or not ("none"), and then why not."""

    by: str
    reason: str = ""


@dataclass(frozen=True)
class Memory:
    """A piece of page-aligned, zeroed memory. It lives as long as this object or any tensor on it."""

    region: memoryview
    address: int
    nbytes: int
    locked: Locked

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """A 1-D tensor on its first `numel` elements."""
        return torch.frombuffer(self.region, dtype=dtype, count=numel)


def allocate(nbytes: int, pin: Pin = False) -> Memory:
    """`nbytes` (at least 1) of memory, rounded up to pages.

    `pin`: True locks its pages (with CUDA if there is CUDA, otherwise with mlock) or raises `NvmeError`; "auto" tries
    to lock them and goes on if that fails; False does not lock them.
    """
    region = _map(max(1, nbytes))
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    locked = _lock(address, len(region), pin)
    view = memoryview(region)
    if locked.by == "cuda":
        # The finalizer holds the region, which would otherwise be unmapped before its pages are unlocked.
        weakref.finalize(view, _unregister, region, address)
    return Memory(view, address, nbytes, locked)


def empty(
    *shape: int | tuple[int, ...] | torch.Size, dtype: torch.dtype = torch.float32, pin: Pin = False
) -> torch.Tensor:
    """A zeroed CPU tensor on new page-aligned memory; `pin` as for `allocate`."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    numel = math.prod(sizes)  # type: ignore[arg-type]
    if numel == 0:
        return torch.empty(sizes, dtype=dtype, device="cpu")  # type: ignore[arg-type]
    return allocate(numel * dtype.itemsize, pin).tensor(dtype, numel).view(sizes)  # type: ignore[arg-type]


def _map(nbytes: int) -> mmap.mmap:
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared mappings get no huge pages
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
            region.madvise(mmap.MADV_HUGEPAGE)
    return region


def _lock(address: int, nbytes: int, pin: Pin) -> Locked:
    if pin not in (True, False, "auto"):
        raise OptionError(f"pin={pin!r}: expected True, False or 'auto'")
    if pin is False:
        return Locked("none", "not asked for")
    locked = _register(address, nbytes) if torch.cuda.is_available() else _mlock(address, nbytes)
    if pin is True and locked.by == "none":
        raise NvmeError(f"{nbytes} bytes cannot be page-locked: {locked.reason}; use pin='auto' to go on without")
    return locked


def _register(address: int, nbytes: int) -> Locked:
    runtime: Any = torch.cuda.cudart()
    code = runtime.cudaHostRegister(address, nbytes, 0)
    return Locked("cuda") if int(code) == 0 else Locked("none", f"cudaHostRegister answered {code}")


def _unregister(region: mmap.mmap, address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


def _mlock(address: int, nbytes: int) -> Locked:
    if sys.platform == "win32":
        return Locked("none", "mlock is not of this platform")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0:
        return Locked("mlock")
    number = ctypes.get_errno()
    return Locked("none", f"mlock: {os.strerror(number)} (see ulimit -l)")
