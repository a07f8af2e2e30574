"""The index of a `TensorStore`: a JSON file with its own checksum, which is replaced atomically.

`{"version": 2, "crc32": ..., "tensors": {name: {"shape", "dtype", "offset", "room", "crc32"}}}`; the first checksum is
that of `tensors` as JSON without spaces and with sorted keys. Version 1 had no such checksum. An index that does not
fit is refused, because a damaged index could give other tensors than were stored.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsx_core import replacing, strict_json

from .errors import FormatError
from .tensor_file import DTYPES, NAMES, SUM, Extent

__all__ = ["Entry", "read_index", "write_index"]

VERSION = 2


@dataclass(frozen=True)
class Entry:
    """A stored tensor: its place, the room it was given, its checksum."""

    extent: Extent
    room: int
    checksum: str


def write_index(path: str, entries: Mapping[str, Entry], *, durable: bool) -> None:
    """Replace the index at `path`; `durable` waits for the device. Raises OSError; then the old index is unchanged."""
    table = {
        name: {
            "shape": list(e.extent.shape), "dtype": NAMES[e.extent.dtype], "offset": e.extent.offset,
            "room": e.room, "crc32": e.checksum,
        }
        for name, e in entries.items()
    }  # fmt: skip
    with replacing(path, durable=durable) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump({"version": VERSION, "crc32": _sum_of_index(table), "tensors": table}, file)


def read_index(path: str, data_bytes: int) -> dict[str, Entry]:
    """The entries of the index at `path`, for a data file of `data_bytes` bytes. Raises FormatError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise FormatError(f"{path}: expected a file")
    try:
        with open(path, "rb") as file:
            return _parse(file.read(), data_bytes)
    except ValueError as error:
        raise FormatError(f"{path}: not an index of a TensorStore that can be read: {error}") from error


def _sum_of_index(table: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(table, separators=(',', ':'), sort_keys=True).encode()):08x}"


def _parse(data: bytes, data_bytes: int) -> dict[str, Entry]:
    """The entries of an index. Raises ValueError when it is damaged or does not fit the data file."""
    found = strict_json.table(strict_json.parse(data), "index")
    version = found.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ValueError(f"version {version!r:.20}, this package reads 1 to {VERSION}")
    tensors = strict_json.table(found.get("tensors"), "tensors")
    expected = {"version", "tensors", "crc32"} if version > 1 else {"version", "tensors"}
    if set(found) != expected or (version > 1 and found["crc32"] != _sum_of_index(tensors)):
        raise ValueError("its checksum is wrong: the file was damaged")
    entries = {name: _parse_entry(name, entry) for name, entry in tensors.items()}
    end, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].extent.offset):
        if entry.extent.offset < end:
            raise ValueError(f"{name!r:.40} and {before!r:.40} share bytes")
        if entry.extent.nbytes and entry.extent.offset + entry.extent.nbytes > data_bytes:
            raise ValueError(f"{name!r:.40} lies beyond the {data_bytes} bytes of data")
        end, before = entry.extent.offset + entry.room, name
    return entries


def _parse_entry(name: str, value: Any) -> Entry:
    what = f"{name!r:.40}"
    fields = strict_json.table(value, what)
    if set(fields) != {"shape", "dtype", "offset", "room", "crc32"} or fields["dtype"] not in tuple(DTYPES):
        raise ValueError(f"{what}: expected shape, dtype, offset, room and crc32")
    shape = strict_json.shape(fields["shape"], what)
    extent = Extent(shape, DTYPES[fields["dtype"]], strict_json.size(fields["offset"], what))
    room = strict_json.size(fields["room"], what)
    if extent.nbytes > room or not isinstance(fields["crc32"], str) or not SUM.fullmatch(fields["crc32"]):
        raise ValueError(f"{what}: its room or checksum does not fit it")
    return Entry(extent, room, fields["crc32"])
