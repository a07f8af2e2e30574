"""The index file of this package: rows of numbers in one file, read through a memory map.

A row has the numbers of one entry: the tokens of a sample, the samples of one difficulty, one value. All rows have the
same data type. Rows either have one common size, or an array of offsets says where each begins.

Layout, all numbers little endian:

    bytes 0-7     magic, ``DSXINDEX``
    bytes 8-11    version of the format, u32, 1
    bytes 12-15   CRC-32 of the header, u32
    bytes 16-23   position of the header, u64
    bytes 24-31   length of the header in bytes, u64
    bytes 32-63   zero
    byte 64 on    the arrays, each at a multiple of 64
    at the end    the header: UTF-8 JSON

    {"values": {"dtype": "<u4", "count": 10, "offset": 64, "crc32": 123},
     "offsets": {...} or null,          first value of each row, and the count of values: u64, rows + 1 entries
     "row_size": 1 or null,             numbers per row where offsets is null
     "facts": {...}}                    the writer's description of the content

The header is at the end, so that a file can be written in one pass without knowing the number of rows. It is
written under a temporary name and renamed when complete: a file with the right name is complete. Opening a file checks
magic, version, header and size; `verify()` also reads every value and compares the CRC-32.

Left out: compression, several data types in one file, changes in place.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from dsx_core.files import temporary_beside

from ..errors import DataArgumentError, IndexFileError

__all__ = ["IndexFile", "IndexWriter", "SUFFIX"]

SUFFIX = ".dsxi"
_MAGIC = b"DSXINDEX"
_VERSION = 1
_PREAMBLE = struct.Struct("<8sIIQQ32x")
_ALIGN = 64


class IndexWriter:
    """Writes one index file, row after row.

    Args:
        path: the file to write; by convention its suffix is ``.dsxi``.
        dtype: numpy data type of the values: integers or floating point.
        row_size: numbers per row if all rows are equally long; None: rows of any length.
        facts: description of the content: a dictionary of JSON values.

    Raises:
        DataArgumentError: the data type cannot be stored.
    """

    def __init__(
        self, path: str | os.PathLike[str], dtype: Any, *, row_size: int | None = None, facts: Any = None
    ) -> None:
        self.path = Path(path)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype.kind not in "iuf":
            raise DataArgumentError(f"IndexWriter(dtype=...): got {dtype}, expected an integer or floating-point type")
        if row_size is not None and row_size < 1:
            raise DataArgumentError(f"IndexWriter(row_size=...): got {row_size}, expected at least 1 or None")
        self.row_size, self.facts = row_size, dict(facts or {})
        self._sizes: list[np.ndarray] = []
        self._count = self._crc = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Not `dsx_core.replacing`: the file is open over many calls, and no block of code ends with it.
        self._temporary = temporary_beside(self.path)
        self._file: Any = open(self._temporary, "wb")  # noqa: SIM115 - closed by finish() or abandon()
        self._file.write(b"\0" * _PREAMBLE.size)

    def add(self, row: Any) -> None:
        """Append one row: a tensor, an array or a list of numbers. Raises `DataArgumentError` as `add_rows` does."""
        values = np.asarray(row).reshape(-1)
        self.add_rows(values, [values.size])

    def add_rows(self, values: Any, sizes: Any = None) -> None:
        """Append several rows at once.

        Args:
            values: numbers of all rows, one after the other.
            sizes: numbers per row; not needed with a `row_size`.

        Raises:
            DataArgumentError: the sizes do not add up to the number of values, or the data type cannot hold a value.
        """
        given = np.asarray(values).reshape(-1)
        flat = self._converted(given)
        if self.row_size is not None:
            if flat.size % self.row_size:
                raise DataArgumentError(
                    f"{self.path}: got {flat.size} values, expected a multiple of the row size {self.row_size}"
                )
        else:
            lengths = np.asarray([flat.size] if sizes is None else sizes, dtype=np.int64).reshape(-1)
            if int(lengths.sum()) != flat.size or (lengths < 0).any():
                raise DataArgumentError(
                    f"{self.path}: got rows of {int(lengths.sum())} values together, expected {flat.size}"
                )
            self._sizes.append(lengths)
        data = np.ascontiguousarray(flat).data if flat.size else b""
        self._crc = zlib.crc32(data, self._crc)
        self._file.write(data)
        self._count += flat.size

    def _converted(self, given: np.ndarray) -> np.ndarray:
        flat = given.astype(self.dtype, copy=False)
        if given.dtype != self.dtype and self.dtype.kind in "iu" and not np.array_equal(flat, given):
            wrong = given[np.flatnonzero(flat != given)[0]]
            raise DataArgumentError(
                f"{self.path}: got the value {wrong}, which {self.dtype.name} cannot hold; choose a wider data type"
            )
        return flat

    def finish(self) -> Path:
        """Write the header and rename the file to its final name. Returns the path."""
        values = self._array(self.dtype, self._count, _PREAMBLE.size, self._crc)
        offsets = None
        if self.row_size is None:
            sizes = np.concatenate(self._sizes) if self._sizes else np.zeros(0, np.int64)
            ends = np.zeros(sizes.size + 1, "<u8")
            np.cumsum(sizes, out=ends[1:])
            offsets = self._array(ends.dtype, ends.size, self._align(), zlib.crc32(ends.data))
            self._file.write(ends.tobytes())
        position = self._align()
        header = json.dumps(
            {"values": values, "offsets": offsets, "row_size": self.row_size, "facts": self.facts}
        ).encode()
        self._file.write(header)
        self._file.seek(0)
        self._file.write(_PREAMBLE.pack(_MAGIC, _VERSION, zlib.crc32(header), position, len(header)))
        self._file.close()
        os.replace(self._temporary, self.path)
        return self.path

    def abandon(self) -> None:
        """Close and remove the unfinished file."""
        if not self._file.closed:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def _align(self) -> int:
        position = self._file.tell()
        padded = -(-position // _ALIGN) * _ALIGN
        self._file.write(b"\0" * (padded - position))
        return padded

    @staticmethod
    def _array(dtype: np.dtype, count: int, offset: int, crc: int) -> dict[str, Any]:
        return {"dtype": dtype.str, "count": count, "offset": offset, "crc32": crc}

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
        elif not self._file.closed:
            self.finish()


class IndexFile:
    """Reads an index file; `index[i]` is row i, a view of the memory map.

    Args:
        path: the file.

    Raises:
        IndexFileError: the file is not an index file, or it is truncated or damaged. The message names file and place.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        header = self._read_header()
        try:
            self.row_size: int | None = header["row_size"]
            self.facts: dict[str, Any] = header["facts"]
            self._described = {name: header[name] for name in ("values", "offsets") if header[name] is not None}
            self.values = self._map("values")
            self.offsets = self._map("offsets") if "offsets" in self._described else None
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, IndexFileError):
                raise
            raise self._error(f"the header is damaged ({error!r})") from error
        self._check_rows()

    @property
    def dtype(self) -> np.dtype:
        """Data type of the values."""
        return self.values.dtype

    @property
    def sizes(self) -> np.ndarray:
        """Numbers in each row, int64."""
        if self.offsets is None:
            return np.full(len(self), self.row_size, np.int64)
        return np.diff(np.asarray(self.offsets, np.int64))

    def start(self, row: int) -> int:
        """Position in `values` of the first number of a row; `start(len(index))` is the count of values."""
        return row * int(self.row_size or 0) if self.offsets is None else int(self.offsets[row])

    def __len__(self) -> int:
        return len(self.values) // int(self.row_size or 1) if self.offsets is None else len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        count = len(self)
        place = row + count if row < 0 else row
        if not 0 <= place < count:
            raise IndexError(f"row {row} of {self.path}: it has {count} rows")
        return self.values[self.start(place) : self.start(place + 1)]

    def verify(self) -> None:
        """Read everything and compare it with the stored checksums.

        Raises:
            IndexFileError: an array has other bytes than were written.
        """
        for name, array in (("values", self.values), ("offsets", self.offsets)):
            if array is None:
                continue
            crc = 0
            for first in range(0, array.size, 1 << 20):
                crc = zlib.crc32(np.ascontiguousarray(array[first : first + (1 << 20)]).data, crc)
            if crc != self._described[name]["crc32"]:
                raise self._error(
                    f"{name}: got CRC-32 {crc}, expected {self._described[name]['crc32']}; the file is damaged, make"
                    " it again"
                )

    def __reduce__(self) -> Any:
        # Only the path is pickled: a worker process maps the file itself.
        return type(self), (self.path,)

    def _read_header(self) -> dict[str, Any]:
        try:
            size = self.path.stat().st_size
            with open(self.path, "rb") as file:
                first = file.read(_PREAMBLE.size)
                if len(first) < _PREAMBLE.size or first[:8] != _MAGIC:
                    raise self._error("it does not begin with the magic of an index file; is it another kind of file?")
                _, version, crc, position, length = _PREAMBLE.unpack(first)
                if version != _VERSION:
                    raise self._error(f"got version {version}, expected {_VERSION}; a newer dsx-data may have made it")
                if position + length != size:
                    raise self._error(f"got {size} bytes, expected {position + length}; the file is truncated")
                file.seek(position)
                header = file.read(length)
        except OSError as error:
            raise IndexFileError(f"{self.path}: it cannot be read: {error}") from error
        if zlib.crc32(header) != crc:
            raise self._error("the header is damaged")
        return json.loads(header)

    def _map(self, name: str) -> np.ndarray:
        about = self._described[name]
        count, dtype = int(about["count"]), np.dtype(about["dtype"])
        end = int(about["offset"]) + count * dtype.itemsize
        if end > self.path.stat().st_size:
            raise self._error(f"{name}: they end at byte {end}, after the end of the file")
        if not count:
            return np.zeros(0, dtype)
        return np.memmap(self.path, dtype, "r", int(about["offset"]), (count,))

    def _check_rows(self) -> None:
        if self.offsets is None:
            if not self.row_size or len(self.values) % self.row_size:
                raise self._error(f"got {len(self.values)} values in rows of {self.row_size}")
        elif not len(self.offsets) or int(self.offsets[0]) or int(self.offsets[-1]) != len(self.values):
            raise self._error(f"the offsets do not span its {len(self.values)} values")

    def _error(self, text: str) -> IndexFileError:
        return IndexFileError(f"{self.path}: {text}")
