"""From the text of an index file to an `Index`: every key, number and name is checked before it is used."""

from __future__ import annotations

import struct
from typing import Any

from dsx_core import strict_json

from .checks import (
    check_consistent,
    expect,
    expect_file_name,
    expect_int,
    expect_keys,
    expect_str,
    parse_placed,
    parse_scalars,
)
from .crc import Chunks
from .errors import CheckpointCorruptError, CheckpointError, shown
from .format import CHECKSUM_MARK, FAMILIES, FORMAT, HASH, VERSION, Entry, FileEntry, Index, digest_of
from .version1 import parse_version1

_KEYS = (
    "format", "version", "writer", "latest", "hash", "chunk_bytes",
    "files", *FAMILIES, "aliases", "excluded", "scalars", "state", "ranks",
)  # fmt: skip


def parse_index(text: str, where: str) -> Index:
    """Parse and check. `where` names the file in errors.

    Raises:
        CheckpointCorruptError: the text is not what was written.
        CheckpointError: it is no index, or one of a version that this dsx does not read.
    """
    try:
        data = strict_json.parse(text, nan=True)  # version 1 wrote them
    except ValueError as error:
        raise CheckpointCorruptError(f"{where}: not JSON ({error}); the checkpoint is damaged") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{where}: got no '{FORMAT}' index; expected one written by dsx")
    version = data.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{where}: got format version {shown(version)}, this dsx reads versions 1 to {VERSION}; upgrade dsx",
            code="DSX506",
        )
    if "checksum" in data or version > 1:  # the first checkpoints of version 1 had none
        _check_digest(text, data.pop("checksum", None), where)
    try:
        return parse_version1(data) if version == 1 else _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointCorruptError(f"{where}: the index is damaged ({error!r})") from error


def _parse(data: dict[str, Any]) -> Index:
    if data["version"] == 2:
        expect_keys("the index", {"latest": False, **data}, [key for key in _KEYS if key != "ranks"])
        data = {"latest": False, **data, "ranks": []}  # the first checkpoints of version 2 did not have `latest`
    expect_keys("the index", data, _KEYS)
    if data["hash"] != HASH:
        raise ValueError(f"hash {shown(data['hash'])}, expected {HASH!r}")
    chunk_bytes = expect_int(data["chunk_bytes"])
    if not chunk_bytes:
        raise ValueError("chunk_bytes 0, expected more")
    files = {expect_file_name(name): _parse_file(name, values) for name, values in data["files"].items()}
    tensors = {
        family: {name: _parse_entry(name, entry, chunk_bytes) for name, entry in data[family].items()}
        for family in FAMILIES
    }
    index = Index(
        files=files,
        tensors=tensors,
        aliases={n: tuple(map(expect_str, expect(a, list))) for n, a in data["aliases"].items()},
        excluded=tuple(map(expect_str, expect(data["excluded"], list))),
        scalars={key: parse_scalars(values) for key, values in data["scalars"].items()},
        state=expect(data["state"], dict),
        ranks=tuple(expect(data["ranks"], list)),
        latest=expect(data["latest"], bool),
        writer=expect_str(data["writer"]),
        chunk_bytes=chunk_bytes,
        version=data["version"],
    )
    check_consistent(index)
    return index


def _parse_file(name: str, values: Any) -> FileEntry:
    expect_keys(shown(name), values, ("bytes", "header_bytes", "header_hash"))
    (crc,) = _parse_crcs(expect_str(values["header_hash"]), 1)
    return FileEntry(expect_int(values["bytes"]), expect_int(values["header_bytes"]), crc)


def _parse_entry(name: str, entry: dict[str, Any], chunk_bytes: int) -> Entry:
    expect_keys(shown(name), entry, ("dtype", "shape", "file", "offset", "hashes"))
    placed = parse_placed(name, entry)
    count = -(-placed.spec.nbytes // chunk_bytes)
    crcs = _parse_crcs(expect_str(entry["hashes"]), count)
    return Entry(placed, Chunks.grid(placed.spec.nbytes, chunk_bytes, crcs))


def _parse_crcs(text: str, count: int) -> tuple[int, ...]:
    data = bytes.fromhex(text) if len(text) == 8 * count else b""
    if len(data) != 4 * count:
        raise ValueError(f"hashes of {len(text)} characters, expected {8 * count}")
    return struct.unpack(f">{count}I", data)


def _check_digest(text: str, digest: object, where: str) -> None:
    head, mark, tail = text.rpartition(CHECKSUM_MARK)
    if not mark or tail != f'{digest}"}}' or digest_of(head) != digest:
        raise CheckpointCorruptError(
            f"{where}: the text is not what was saved (its checksum differs); restore the file or load another tag"
        )
