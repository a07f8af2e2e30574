"""Tensors to and from disk at the drive's speed, alone or under ZeRO-Infinity.

    import dsx_nvme
    handle = dsx_nvme.aio_handle(queue_depth=32)
    handle.async_pwrite(tensor, "tensor.bin")
    handle.wait()

`Engine` is the layer below (tickets, any number of files); `TensorFile` and `TensorStore` are the layer above (names,
checksums). `python -m dsx_nvme` reports which engines run on this machine, and why.
"""

from ._version import __version__
from .builders import AsyncIOBuilder, GDSBuilder
from .checksum import crc32
from .config import AioConfig
from .engine import Engine
from .errors import NvmeError
from .fast_writer import FastFileWriter
from .files import access, explain
from .gds import gds_handle
from .handle import aio_handle, aio_read, aio_write, deepspeed_memcpy
from .memory import empty
from .native import native_status
from .pool import BufferPool
from .store import TensorStore
from .tensor_file import TensorFile

__all__ = [
    "AioConfig",
    "AsyncIOBuilder",
    "BufferPool",
    "Engine",
    "FastFileWriter",
    "GDSBuilder",
    "NvmeError",
    "TensorFile",
    "TensorStore",
    "__version__",
    "access",
    "aio_handle",
    "aio_read",
    "aio_write",
    "crc32",
    "deepspeed_memcpy",
    "empty",
    "explain",
    "gds_handle",
    "native_status",
]
