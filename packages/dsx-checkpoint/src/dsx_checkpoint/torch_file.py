"""A file that `torch.load` reads, written one tensor at a time.

`torch.save` wants all values in memory. Its format is simple: a zip file, nothing compressed, with a pickle that says
how tensors are made of storages (`data.pkl`), and a record for each storage (`data/<key>`). Here the pickle is written
from names, shapes and dtypes alone, and the records follow, each when its values are there.

    archive/data.pkl, archive/byteorder, archive/data/0, archive/data/1, ..., archive/version

The pickle is what torch's own restricted reader accepts (`weights_only=True`), and records begin at multiples of 64
bytes, so that `mmap=True` gives aligned tensors. Tensors of one `Tensor` share a storage, as tied weights do.

Left out: tensors that are parts of a storage, and anything but a flat dictionary of tensors.
"""

from __future__ import annotations

import collections
import importlib
import io
import math
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError, shown
from .files import PIECE_BYTES, opened
from .foreign.source import Tensor
from .regions import raw_bytes

__all__ = ["write_torch_file"]

_TOP = "archive"
_ALIGNMENT = 64
_LOCAL_HEADER = 30
"""Bytes before the name of a record (zip's APPNOTE, 4.3.7)."""
_ZIP64_EXTRA = 20
"""Bytes with which `zipfile` notes sizes of 64 bits behind the name."""
_PADDING = b"FB"
"""The mark of the field with which torch itself pads."""

_STORAGES = {
    torch.float64: "DoubleStorage", torch.float32: "FloatStorage", torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage", torch.int64: "LongStorage", torch.int32: "IntStorage",
    torch.int16: "ShortStorage", torch.int8: "CharStorage", torch.uint8: "ByteStorage", torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage", torch.complex128: "ComplexDoubleStorage",
}  # fmt: skip
"""Dtypes that a storage of the format knows. Tensors of others say their dtype themselves."""


def write_torch_file(
    path: Path, tensors: Mapping[str, Tensor], done: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Write a dictionary of tensors to a new file; at the end it is on the disk.

    Args:
        tensors: by name. Memory holds one at a time.
        done: called with the bytes of each tensor that is written.

    Raises:
        CheckpointError: a tensor has another shape or dtype than it said.
        OSError: the file cannot be written.
    """
    stored = _Stored.of(tensors)
    with path.open("xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            _write(archive, file, "data.pkl", memoryview(_pickle(tensors, stored)))
            _write(archive, file, "byteorder", memoryview(sys.byteorder.encode()))
            for one in stored.values():
                _write(archive, file, f"data/{one.key}", _bytes_of(one))
                done(one.tensor.nbytes)
            _write(archive, file, "version", memoryview(b"3\n"))
    with opened(path, os.O_RDWR) as fd:
        os.fsync(fd)


@dataclass(frozen=True)
class _Stored:
    """A storage: a whole tensor. `name` is the first that it has."""

    key: str
    name: str
    tensor: Tensor

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> dict[int, _Stored]:
        """By the `id` of what fetches the values, in which tied tensors are alike."""
        found: dict[int, _Stored] = {}
        for name, tensor in tensors.items():
            found.setdefault(id(tensor.fetch), _Stored(str(len(found)), name, tensor))
        return found


def _bytes_of(one: _Stored) -> memoryview:
    value = one.tensor.fetch().detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if (value.numel(), value.dtype) != (math.prod(one.tensor.shape), one.tensor.dtype):
        raise CheckpointError(
            f"{shown(one.name)}: got {value.numel()} values of {value.dtype}, expected shape {one.tensor.shape} of"
            f" {one.tensor.dtype}"
        )
    return raw_bytes(value)


def _write(archive: zipfile.ZipFile, file: io.BufferedIOBase, name: str, data: memoryview) -> None:
    """A record, whose bytes begin at a multiple of `_ALIGNMENT`."""
    info = zipfile.ZipInfo(f"{_TOP}/{name}")
    begin = file.tell() + _LOCAL_HEADER + len(info.filename.encode()) + _ZIP64_EXTRA
    padding = -(begin + 4) % _ALIGNMENT
    info.extra = _PADDING + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(info, "w", force_zip64=True) as record:
        for at in range(0, len(data), PIECE_BYTES):
            record.write(data[at : at + PIECE_BYTES])


# - The pickle


class _Made:
    """In the place of a tensor in what is pickled."""

    def __init__(self, tensor: Tensor, storage: _Storage) -> None:
        self.tensor, self.storage = tensor, storage


class _Storage:
    """In the place of a storage."""

    def __init__(self, one: _Stored) -> None:
        name = _STORAGES.get(one.tensor.dtype, "UntypedStorage")
        numel = math.prod(one.tensor.shape) if name != "UntypedStorage" else one.tensor.nbytes
        self.saved = ("storage", getattr(torch, name), one.key, "cpu", numel)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.saved if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _Made):
            return NotImplemented
        utils: Any = importlib.import_module("torch._utils")
        shape, dtype = obj.tensor.shape, obj.tensor.dtype
        strides = tuple(math.prod(max(1, n) for n in shape[d + 1 :]) for d in range(len(shape)))
        common = (obj.storage, 0, shape, strides, False, collections.OrderedDict())
        if dtype in _STORAGES:
            return utils._rebuild_tensor_v2, common
        return utils._rebuild_tensor_v3, (*common, dtype)


def _pickle(tensors: Mapping[str, Tensor], stored: Mapping[int, _Stored]) -> bytes:
    made = {key: _Made(one.tensor, _Storage(one)) for key, one in stored.items()}
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump({name: made[id(tensor.fetch)] for name, tensor in tensors.items()})
    return buffer.getvalue()
