"""Reads the index of format version 1 (until November 2026), in which each slice has a hash, and the names of files
tell the family.

    {"format", "version": 1, "hash": "crc32",
     "tensors": {name: {"dtype", "shape", "file", "offset"}}, "slices": {name: [[first, behind the last, hash], ...]},
     "aliases", "excluded", "scalars", "state", and "checksum" in all but the first}

A slice is the range of elements that one rank wrote, row by row. Here it becomes a chunk of that size. Sizes and
headers of the files were not stored; they are computed from the tensors, because all files of this version had the same
layout (`plan.py`).
"""

from __future__ import annotations

import zlib
from typing import Any

from .checks import check_consistent, expect, expect_int, expect_keys, expect_str, parse_placed, parse_scalars
from .crc import Chunks
from .errors import shown
from .format import FAMILIES, HASH, MODEL, WEIGHT_MAP_NAME, Entry, FileEntry, Index, Placed
from .plan import plan_file

_KEYS = ("format", "version", "hash", "tensors", "slices", "aliases", "excluded", "scalars", "state")


def parse_version1(data: dict[str, Any]) -> Index:
    """The index in the present form. Raises `ValueError`, `TypeError` or `KeyError` if dsx cannot have written it."""
    expect_keys("the index", data, _KEYS)
    if data["hash"] != HASH:
        raise ValueError(f"hash {shown(data['hash'])}, expected {HASH!r}")
    expect_keys("slices", data["slices"], data["tensors"])
    tensors: dict[str, dict[str, Entry]] = {family: {} for family in FAMILIES}
    by_file: dict[str, list[Placed]] = {}
    for name, values in data["tensors"].items():
        expect_keys(shown(name), values, ("dtype", "shape", "file", "offset"))
        placed = parse_placed(name, values)
        tensors[_family_of(placed)][name] = Entry(placed, _chunks(placed, data["slices"][name]))
        by_file.setdefault(placed.file, []).append(placed)
    index = Index(
        files={name: _file_of(name, placed) for name, placed in by_file.items()},
        tensors=tensors,
        aliases={n: tuple(map(expect_str, expect(a, list))) for n, a in data["aliases"].items()},
        excluded=tuple(map(expect_str, expect(data["excluded"], list))),
        scalars={key: parse_scalars(values) for key, values in data["scalars"].items()},
        state=expect(data["state"], dict),
        version=1,
    )
    check_consistent(index)
    return index


def own_files(index: Index) -> set[str]:
    """Names of files that version 1 wrote and did not list."""
    return {WEIGHT_MAP_NAME} if sum(name.startswith(MODEL) for name in index.files) > 1 else set()


def _family_of(placed: Placed) -> str:
    family = next((family for family in FAMILIES if placed.file.startswith(family)), None)
    if family is None or not placed.file.endswith(".safetensors"):
        raise ValueError(f"file {shown(placed.file)} of {shown(placed.spec.name)} is none that dsx writes")
    return family


def _file_of(name: str, tensors: list[Placed]) -> FileEntry:
    plan = plan_file(name, [placed.spec for placed in tensors])
    if list(plan.tensors) != tensors:
        raise ValueError(f"the places of the tensors in {shown(name)} are not those of a file")
    return FileEntry(plan.size, plan.header_bytes, zlib.crc32(plan.header))


def _chunks(placed: Placed, slices: Any) -> Chunks:
    parts = sorted(tuple(map(expect_int, part)) for part in expect(slices, list))
    position, numel = 0, placed.spec.numel
    for start, stop, _ in parts:
        if start != position or (stop <= start and numel):
            raise ValueError(f"slices of {shown(placed.spec.name)} leave a hole, overlap or are empty at {position}")
        position = stop
    if position != numel or (not numel and len(parts) > 1):
        raise ValueError(f"slices of {shown(placed.spec.name)} end at element {position} of {numel}")
    if not numel:
        return Chunks((), 0, ())
    itemsize = placed.spec.itemsize
    return Chunks([p[0] * itemsize for p in parts], placed.spec.nbytes, [p[2] for p in parts])
