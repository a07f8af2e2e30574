"""Moving tensors: regions to and from files, with hashes and bounded memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from dsx_core.host_memory import tell_read

from .boxes import Region
from .crc import Chunks, Sums
from .direct import FileWriter
from .errors import CheckpointCorruptError, shown
from .files import PIECE_BYTES, opened, read_into
from .format import CHUNK_BYTES, DTYPES, Placed, TensorSpec


def raw_bytes(flat: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor, without a copy. `Tensor.numpy` would need numpy to be installed."""
    if not flat.numel():
        return memoryview(b"")
    memory = (ctypes.c_ubyte * (flat.numel() * flat.element_size())).from_address(flat.data_ptr())
    memory.tensor = flat  # type: ignore[attr-defined]  # keeps it as long as the view
    return memoryview(memory).cast("B")


def write_region(file: FileWriter, placed: Placed, region: Region, values: torch.Tensor, sums: Sums) -> None:
    """Write 1-D `values` (any device) as a region of the tensor at `placed`, and add their bytes to `sums`.

    The values must stay as they are until `file.wait()`.
    """
    for at, data in _pieces(placed.spec, region, values):
        file.write(data, placed.offset + at)  # first, so that it may go on while the bytes are hashed
        sums.add(at, data)


def hash_region(spec: TensorSpec, region: Region, values: torch.Tensor, sums: Sums) -> None:
    """Like `write_region`, without the file."""
    for at, data in _pieces(spec, region, values):
        sums.add(at, data)


def _pieces(spec: TensorSpec, region: Region, values: torch.Tensor) -> Iterator[tuple[int, memoryview]]:
    """Values in pieces on the host, each with the byte of the tensor at which it lies, ascending."""
    step = max(1, PIECE_BYTES // spec.itemsize)
    begin, host = 0, raw_bytes(values[:0])  # elements [begin, ...) of `values` that lie on the host
    for run in region.runs(spec.shape):
        done = 0
        while done < run.numel:
            first = run.first + done
            if (first - begin) * spec.itemsize >= len(host):
                part = values[first : first + step].contiguous().cpu()
                tell_read(part, "writer of checkpoints")
                begin, host = first, raw_bytes(part)
            data = host[(first - begin) * spec.itemsize :][: (run.numel - done) * spec.itemsize]
            yield (run.at + done) * spec.itemsize, data
            done += len(data) // spec.itemsize


def read_region(fd: int, placed: Placed, region: Region, sums: Sums) -> torch.Tensor:
    """A region as a new 1-D CPU tensor of the stored dtype; its bytes are added to `sums`.

    Raises:
        CheckpointCorruptError: the file is too short.
    """
    spec = placed.spec
    missing = placed.offset + spec.nbytes - os.fstat(fd).st_size
    if missing > 0:  # before anything is allocated: a damaged index may speak of any size
        raise CheckpointCorruptError(
            f"{placed.file}: ends {missing} bytes before the end of {shown(spec.name)}; it was cut short"
        )
    out = torch.empty(region.numel, dtype=getattr(torch, DTYPES[spec.dtype][0]), device="cpu")
    view = raw_bytes(out)
    for run in region.runs(spec.shape):
        begin, end = run.first * spec.itemsize, (run.first + run.numel) * spec.itemsize
        for first in range(begin, end, PIECE_BYTES):
            data = view[first : min(end, first + PIECE_BYTES)]
            at = run.at * spec.itemsize + first - begin
            read_into(fd, placed, at, data)
            sums.add(at, data)
    return out


def read_whole(path: Path, placed: Placed) -> torch.Tensor:
    """A whole tensor of a safetensors file, unverified."""
    with opened(path, os.O_RDONLY) as fd:
        region = Region.whole(placed.spec.shape)
        return read_region(fd, placed, region, Sums(Chunks.grid(placed.spec.nbytes, CHUNK_BYTES, ()))).reshape(
            placed.spec.shape
        )
