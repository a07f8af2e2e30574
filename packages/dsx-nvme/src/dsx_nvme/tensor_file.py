"""`TensorFile`: named tensors in one safetensors file, whose extents are fixed before the first byte is written.

The format is safetensors (8 bytes of header length, JSON header, data), with three additions that it allows:

* the header is padded so that the data begin on a page;
* tensors named `__pad_N__` fill the space between extents, so that every extent begins on a page;
* `__metadata__` holds a CRC-32 per tensor as eight hexadecimal digits (`--------`: none), and one over names, shapes,
  types and places (`header_crc32`).

After the file was made, only the digits per tensor change, in place. A header page that was written partly before a
crash shows as a wrong checksum of a tensor.

Extents are preallocated, so that several writers can fill one file, each its own slices. Left out: changing names or
shapes later (see `TensorStore`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import operator
import os
import re
import zlib
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from dsx_core import strict_json, sync_folder

from .checksum import crc32
from .engine import Engine
from .errors import ChecksumError, FormatError, OptionError, TensorError
from .memory import empty
from .ticket import Ticket

PAGE = 4096
MAX_HEADER = 100_000_000  # bytes; the same limit as the safetensors library
NO_SUM = "-" * 8
SUM = re.compile("[0-9a-f]{8}|-{8}")
SUM_KEY, HEADER_SUM_KEY, PAD = "crc32.", "header_crc32", "__pad_"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Extent:
    """The place of a tensor: `offset` bytes from the beginning of the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.dtype.itemsize


@dataclass
class Reading:
    """A tensor that is being read from disk. `result()` (or `await`) returns it; `wait()` is the same."""

    ticket: Ticket
    tensor: torch.Tensor

    def result(self, timeout: float | None = None) -> torch.Tensor:
        """Wait for the tensor and return it. Raises the errors of `Ticket.wait`, and ChecksumError."""
        self.ticket.wait(timeout)
        return self.tensor

    wait = result

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self.ticket.done()

    def __await__(self) -> Generator[Any, None, torch.Tensor]:
        import asyncio  # lazy import: most programs never await

        return asyncio.get_running_loop().run_in_executor(None, self.result).__await__()


def layout(specs: Mapping[str, Any]) -> tuple[dict[str, Extent], int]:
    """Extents for tensors or (shape, dtype) pairs, relative to the beginning of the data, and the bytes of data."""
    extents, position = {}, 0
    for name, spec in specs.items():
        shape, dtype = (spec.shape, spec.dtype) if isinstance(spec, torch.Tensor) else spec
        if dtype not in NAMES:
            raise TensorError(f"{name}: a file cannot hold {dtype}; expected one of {', '.join(map(str, NAMES))}")
        if name.startswith(PAD) or name == "__metadata__":
            raise OptionError(f"{name!r} is a reserved name")
        position = -(-position // PAGE) * PAGE
        extents[name] = Extent(tuple(shape), dtype, position)
        position += extents[name].nbytes
    return extents, position


def header(extents: Mapping[str, Extent], sums: Mapping[str, str]) -> bytes:
    """The first bytes of the file, up to the data. `extents` are relative to the data."""
    table: dict[str, Any] = {}
    position = 0
    for number, (name, extent) in enumerate(extents.items()):
        if extent.offset > position:
            gap = extent.offset - position
            table[f"{PAD}{number}__"] = {"dtype": "U8", "shape": [gap], "data_offsets": [position, extent.offset]}
        position = extent.offset + extent.nbytes
        table[name] = {
            "dtype": NAMES[extent.dtype],
            "shape": list(extent.shape),
            "data_offsets": [extent.offset, position],
        }
    metadata = {"format": "pt", HEADER_SUM_KEY: _sum_of_table(table)}
    metadata.update({SUM_KEY + name: sums.get(name, NO_SUM) for name in extents})
    text = json.dumps({"__metadata__": metadata, **table}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    return len(text).to_bytes(8, "little") + text


def _sum_of_table(table: Mapping[str, Any]) -> str:
    """Checksum of everything in a header except `__metadata__`."""
    return f"{zlib.crc32(json.dumps(table, separators=(',', ':'), sort_keys=True).encode()):08x}"


def parse(path: str, data: bytes, size: int) -> tuple[dict[str, Extent], dict[str, str]]:
    """Extents (from the beginning of the file) and checksums of a header.

    Raises FormatError if the data are not a header, or do not fit the file: extents that overlap, are outside the file
    or have another size than their shape, names that occur twice, a header with a wrong checksum.
    """
    try:
        table = strict_json.table(strict_json.parse(data[8:]), "header")
        metadata = strict_json.table(table.pop("__metadata__", {}), "__metadata__")
        found = {name: _parse_entry(name, entry, size - len(data)) for name, entry in table.items()}
        if HEADER_SUM_KEY in metadata and metadata[HEADER_SUM_KEY] != _sum_of_table(table):
            raise ValueError(f"its checksum is {_sum_of_table(table)}, not {metadata[HEADER_SUM_KEY]!r:.20}")
        _refuse_overlap(found)
        tensors = {name: extent for name, extent in found.items() if not name.startswith(PAD)}
        extents = {name: Extent(e.shape, e.dtype, len(data) + e.offset) for name, e in tensors.items()}
        return extents, _parse_sums(metadata, extents)
    except ValueError as error:
        raise FormatError(f"{path}: not a safetensors header that can be read: {error}") from error


def _parse_entry(name: str, entry: Any, data_bytes: int) -> Extent:
    what = f"{name!r:.40}"
    entry = strict_json.table(entry, what)
    if {"shape", "dtype", "data_offsets"} - set(entry) or not isinstance(entry["dtype"], str):
        raise ValueError(f"{what}: expected shape, dtype and data_offsets")
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{what}: dtype {entry['dtype']!r:.20} is none of {', '.join(DTYPES)}")
    place = strict_json.shape(entry["data_offsets"], what)
    extent = Extent(strict_json.shape(entry["shape"], what), DTYPES[entry["dtype"]], place[0] if place else 0)
    if len(place) != 2 or place[1] - place[0] != extent.nbytes or place[1] > data_bytes:
        raise ValueError(f"{what}: bytes {list(place)} do not fit its shape or the {data_bytes} bytes of data")
    return extent


def _parse_sums(metadata: Mapping[str, Any], extents: Mapping[str, Extent]) -> dict[str, str]:
    sums = {key[len(SUM_KEY) :]: value for key, value in metadata.items() if key.startswith(SUM_KEY)}
    for name, value in sums.items():
        if not isinstance(value, str) or not SUM.fullmatch(value):
            raise ValueError(f"{name!r:.40}: checksum {value!r:.20}, expected eight hexadecimal digits")
    if HEADER_SUM_KEY in metadata and set(sums) != set(extents):
        raise ValueError("the checksums are those of other tensors")
    return sums


def _refuse_overlap(extents: Mapping[str, Extent]) -> None:
    end, before = 0, ""
    for name, extent in sorted(extents.items(), key=lambda item: item[1].offset):
        if extent.nbytes == 0:
            continue
        if extent.offset < end:
            raise ValueError(f"{name!r:.40} and {before!r:.40} share bytes")
        end, before = extent.offset + extent.nbytes, name


class TensorFile:
    """Named tensors in one file. Make one with `create` or `open`; use as a context manager.

    `engine`: an `Engine` to share; without one the file makes its own. `flush` raises errors of writes that were not
    waited for.
    """

    def __init__(self, path: str | os.PathLike, mode: str, engine: Engine | None, checksum: bool) -> None:
        self.path = os.fspath(path)
        self.writable = mode == "r+"
        self.checksum = checksum
        self._own_engine = engine is None
        self.engine = engine if engine is not None else Engine()
        try:
            self._file = self.engine.open(self.path, write=self.writable)
        except BaseException:
            self._close_engine()
            raise
        self._tickets: list[Ticket] = []
        self._dirty = False
        self._data = 0
        self.extents: dict[str, Extent] = {}
        self.sums: dict[str, str] = {}

    @classmethod
    def create(
        cls, path: str | os.PathLike, specs: Mapping[str, Any], *, engine: Engine | None = None, checksum: bool = True
    ) -> TensorFile:
        """A new file with extents for `specs`: name -> tensor (only its shape and dtype are used) or (shape, dtype).

        Replaces an existing file when there is room for the new one. The content is zeros until it is written. Raises
        OSError if the disk has no room for it; then an existing file is unchanged.
        """
        extents, nbytes = layout(specs)
        path = os.fspath(path)
        # Not `dsx_core.replacing`: the engine opens the file before it has its name, and keeps it open afterwards.
        partial = f"{path}.{os.getpid()}.partial"
        self = cls(partial, "r+", engine, checksum)
        try:
            first = header(extents, {})
            self._data = len(first)
            self.extents = {n: Extent(e.shape, e.dtype, e.offset + len(first)) for n, e in extents.items()}
            os.ftruncate(self._file.plain_fd, 0)
            if hasattr(os, "posix_fallocate") and nbytes:
                os.posix_fallocate(self._file.plain_fd, 0, len(first) + nbytes)
            os.ftruncate(self._file.plain_fd, len(first) + nbytes)
            self._write_header(first)
            os.replace(partial, path)  # a process that has the old file open can still read that
        except BaseException:
            self.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            raise
        self.path = self._file.path = path
        return self

    @classmethod
    def open(
        cls, path: str | os.PathLike, mode: str = "r", *, engine: Engine | None = None, checksum: bool = True
    ) -> TensorFile:
        """An existing file, to read ("r") or also to write ("r+"). Any safetensors file can be read.

        Raises FormatError.
        """
        if mode not in ("r", "r+"):
            raise OptionError(f"mode {mode!r}: expected 'r' or 'r+'")
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        self = cls(path, mode, engine, checksum)
        try:
            size = os.fstat(self._file.plain_fd).st_size
            length = int.from_bytes(os.pread(self._file.plain_fd, 8, 0), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise FormatError(f"{self.path}: not a safetensors file (header of {length} bytes in {size} bytes)")
            data = os.pread(self._file.plain_fd, 8 + length, 0)
            self._data = len(data)
            self.extents, self.sums = parse(self.path, data, size)
        except BaseException:
            self.close()
            raise
        return self

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self.extents)

    def __contains__(self, name: str) -> bool:
        return name in self.extents

    def __len__(self) -> int:
        return len(self.extents)

    def write(self, name: str, tensor: torch.Tensor, *, start: int = 0) -> Ticket:
        """Start writing a tensor, or some of its elements from number `start` on (then it has no checksum).

        Returns a ticket to wait for; leave `tensor` alone until then. Raises `OptionError` where the file is open for
        reading, and `TensorError` where dtype or size are not those of `name`.
        """
        extent = self._extent(name, tensor, start)
        if not self.writable:
            raise OptionError(f"{self.path} is open for reading; open it with mode 'r+'")
        whole = tensor.numel() == extent.numel
        self.sums[name] = f"{crc32(tensor):08x}" if self.checksum and whole else NO_SUM
        self._dirty = True
        ticket = self.engine.write(tensor, self._file, extent.offset + start * extent.dtype.itemsize)
        self._tickets = [t for t in self._tickets if not t.done() or t.failed]
        self._tickets.append(ticket)
        return ticket

    def read(self, name: str, out: torch.Tensor | None = None, *, start: int = 0) -> Reading:
        """Start reading a tensor into `out` (if it is shorter, elements from `start` on), or into a new aligned tensor.

        If all elements of a tensor with a checksum are read, they are checked (ChecksumError).
        """
        extent = self._extent(name, out, start)
        if out is None:
            out = empty(extent.shape, dtype=extent.dtype)
        expected = self.sums.get(name, NO_SUM)
        check = self.checksum and expected != NO_SUM and out.numel() == extent.numel
        after = (lambda: self._check(name, out, expected)) if check else None
        return Reading(
            self.engine.read(out, self._file, extent.offset + start * extent.dtype.itemsize, after=after), out
        )

    def flush(self, *, durable: bool = False) -> None:
        """Wait for all writes, then write checksums; `durable` also waits for the device.

        Raises the first error of a write.
        """
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.exception()
        for ticket in tickets:
            ticket.wait()
        if self._dirty:
            relative = {n: Extent(e.shape, e.dtype, e.offset - self._data) for n, e in self.extents.items()}
            self._write_header(header(relative, self.sums))
            self._dirty = False
        if durable:
            os.fsync(self._file.plain_fd)
            sync_folder(os.path.dirname(os.path.abspath(self.path)))

    def close(self) -> None:
        """Flush and close. The file is closed even if a write failed."""
        if self._file.users < 1:
            return
        try:
            self.flush()
        finally:
            self.engine.close_file(self._file)
            self._close_engine()

    def _close_engine(self) -> None:
        if self._own_engine:
            self.engine.close()

    def _write_header(self, data: bytes) -> None:
        if len(data) != self._data:
            raise FormatError(
                f"{self.path}: its header has another layout than this package writes; it can only be read"
            )
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.plain_fd, data[done:], done)

    def _extent(self, name: str, tensor: torch.Tensor | None, start: int) -> Extent:
        if name not in self.extents:
            raise KeyError(f"{self.path} has no tensor {name!r}; it has {', '.join(list(self.extents)[:8])}")
        extent = self.extents[name]
        try:
            start = operator.index(start)
        except TypeError:
            raise OptionError(f"start={start!r}: expected a whole number of elements") from None
        if tensor is None:
            if start != 0:
                raise OptionError(f"{name}: start={start} needs `out`, whose size says how many elements to read")
            return extent
        if tensor.dtype != extent.dtype or start < 0 or start + tensor.numel() > extent.numel:
            raise TensorError(
                f"{name}: got {tensor.numel()} elements of {tensor.dtype} from element {start}, "
                f"the file has {extent.numel} of {extent.dtype}"
            )
        return extent

    def _check(self, name: str, tensor: torch.Tensor, expected: str) -> None:
        found = f"{crc32(tensor):08x}"
        if found != expected:
            extent = self.extents[name]
            raise ChecksumError(
                errno.EBADMSG, f"{name}: checksum {found}, expected {expected}", self.path,
                op="read", offset=extent.offset, nbytes=extent.nbytes,
            )  # fmt: skip
