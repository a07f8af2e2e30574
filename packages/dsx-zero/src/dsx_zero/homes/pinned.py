"""Page-locked host memory of the size that is asked for.

torch's own allocator of page-locked memory rounds every block up to a power of two, so that 33 GiB would lock 64. That
suits what comes and goes in a few sizes. What stays as long as a model (homes, copies of a checkpoint, moved states) is
ordinary memory here, whose pages CUDA locks afterwards.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from dsx_core.device import Device

__all__ = ["locked_empty"]

_EXACT_FROM = 1 << 17
"""Bytes from which on blocks have their exact size, in whole pages. Smaller ones lie in torch's blocks: a page would
cost them much, and they are a small part of a model's state."""


def locked_empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor with arbitrary values in page-locked host memory.

    Raises:
        RuntimeError: the memory, or locking its pages, is refused.
    """
    nbytes = numel * dtype.itemsize
    if nbytes < _EXACT_FROM:
        return torch.empty(numel, dtype=dtype, pin_memory=True, device="cpu")
    try:
        region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(str(error)) from error
    tensor = torch.frombuffer(region, dtype=dtype, count=numel)
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(tensor.data_ptr(), nbytes, 0))
    if code:
        raise RuntimeError(f"cudaHostRegister answered {code}")
    # The finalizer holds the region, so that the pages are there until they are unlocked.
    weakref.finalize(tensor.untyped_storage(), _unlock, region, tensor.data_ptr()).atexit = False
    return tensor


def _unlock(region: mmap.mmap, address: int) -> None:
    """The tensor is gone: unlock its pages, behind the copies that may still use them."""
    Device.of("cuda").synchronize()
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)
