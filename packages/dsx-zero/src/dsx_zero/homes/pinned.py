"""Page-locked host memory of the size that is asked for.

torch's own allocator of page-locked memory rounds every block up to a power of two, so that 33 GiB would lock 64. That
suits what comes and goes in a few sizes. What stays as long as a model (homes, copies of a checkpoint, moved states) is
ordinary memory here, whose pages CUDA locks afterwards. `blocks` has what comes and goes.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from dsx_core.device import Device

__all__ = ["lock_pages", "locked_empty", "mapped", "unlock_idle"]

_EXACT_FROM = 1 << 17
"""Bytes from which on blocks have their exact size, in whole pages. Smaller ones lie in torch's blocks: a page would
cost them much, and they are a small part of a model's state."""


def mapped(nbytes: int) -> mmap.mmap:
    """New pages of the process.

    Raises:
        RuntimeError: the memory is refused.
    """
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(str(error)) from error


def lock_pages(region: mmap.mmap, owner: object) -> weakref.finalize[..., object]:
    """Lock the pages of `region` as long as `owner` is there. Returns what unlocks them at its end.

    Raises:
        RuntimeError: locking them is refused.
    """
    address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, len(region), 0))
    if code:
        raise RuntimeError(f"cudaHostRegister answered {code}")
    # The finalizer holds the region, so that the pages are there until they are unlocked.
    unlock = weakref.finalize(owner, _unlock_behind_copies, region, address)
    unlock.atexit = False
    return unlock


def locked_empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor with arbitrary values in page-locked host memory.

    Raises:
        RuntimeError: the memory, or locking its pages, is refused.
    """
    nbytes = numel * dtype.itemsize
    if nbytes < _EXACT_FROM:
        return torch.empty(numel, dtype=dtype, pin_memory=True, device="cpu")
    region = mapped(nbytes)
    tensor = torch.frombuffer(region, dtype=dtype, count=numel)
    lock_pages(region, tensor.untyped_storage())
    return tensor


def unlock_idle(unlock: weakref.finalize[..., object]) -> None:
    """Unlock pages now that no copy uses them. `unlock`: of `lock_pages`."""
    found = unlock.detach()
    if found is not None:
        _unlock(*found[2])


def _unlock_behind_copies(region: mmap.mmap, address: int) -> None:
    """The owner is gone, and copies may still use the pages."""
    Device.of("cuda").synchronize()
    _unlock(region, address)


def _unlock(region: mmap.mmap, address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)
