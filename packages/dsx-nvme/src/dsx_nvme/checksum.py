"""CRC-32 (as zlib's) of a tensor's bytes. If the compiled module and the CPU have it, carry-less multiplication is
used.
"""

from __future__ import annotations

import ctypes
import zlib

import torch

from . import native, staging

PIECE = 64 << 20


def crc32(tensor: torch.Tensor) -> int:
    """The checksum of a tensor's bytes in row-major order. A tensor on a device is copied to the host first."""
    flat = staging.as_bytes(tensor.detach().contiguous().cpu())
    if flat.numel() == 0:
        return 0
    module = native.module()
    if module is not None:
        return module.crc32(0, flat.data_ptr(), flat.numel())
    view = memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")
    value = 0
    for start in range(0, len(view), PIECE):
        value = zlib.crc32(view[start : start + PIECE], value)
    return value
