"""Small checks of values from an index; each raises `TypeError`, `ValueError` or `KeyError`."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any

from .errors import shown
from .format import DTYPES, FAMILIES, FLOAT_MARKER, INDEX_NAME, MODEL, OPTIMIZER, Index, Placed, TensorSpec

_LONGEST_NAME = 255  # of a file, on every file system


def expect(value: Any, kind: type) -> Any:
    """Returns `value` if it is of this kind. Raises `TypeError`."""
    if not isinstance(value, kind):
        raise TypeError(f"got {shown(value)}, expected {kind.__name__}")
    return value


def expect_int(value: Any) -> int:
    """Returns `value` if it is a count: an integer of 0 or more, and not a boolean. Raises `TypeError`."""
    if type(value) is not int or value < 0:
        raise TypeError(f"got {shown(value)}, expected an integer of 0 or more")
    return value


def expect_str(value: Any) -> str:
    """Text. Raises `TypeError`."""
    return expect(value, str)


def expect_file_name(value: Any) -> str:
    """Returns `value` if it is the plain name of a file in the index's folder. Raises `ValueError` for other paths."""
    name = expect_str(value)
    if not name or "/" in name or "\\" in name or "\0" in name or name.startswith(".") or name == INDEX_NAME:
        raise ValueError(f"file name {shown(name)} leaves the checkpoint")
    if len(name.encode()) > _LONGEST_NAME:  # `encode` refuses half of a surrogate pair, as file systems do
        raise ValueError(f"file name {shown(name)} is longer than {_LONGEST_NAME} bytes")
    return name


def expect_keys(what: str, data: Any, keys: Collection[str]) -> None:
    """Raise `ValueError` unless `data` is a dictionary with these keys and no others."""
    if not isinstance(data, dict):
        raise TypeError(f"{what}: got {shown(data)}, expected an object")
    missing, unknown = [k for k in keys if k not in data], [k for k in data if k not in keys]
    if missing or unknown:
        raise ValueError(f"{what}: keys missing: {shown(missing[:10])}, unknown: {shown(unknown[:10])}")


def parse_placed(name: str, entry: dict[str, Any]) -> Placed:
    """Name, dtype, shape and place of a tensor. Raises `ValueError`, `TypeError` or `KeyError`."""
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {shown(entry['dtype'])} of {shown(name)}")
    spec = TensorSpec(name, entry["dtype"], tuple(map(expect_int, entry["shape"])))
    return Placed(spec, expect_file_name(entry["file"]), expect_int(entry["offset"]))


def parse_scalars(values: dict[str, Any]) -> dict[str, Any]:
    """Optimizer states that are numbers."""
    return {name: _parse_number(value) for name, value in values.items()}


def _parse_number(value: Any) -> Any:
    if isinstance(value, dict) and list(value) == [FLOAT_MARKER]:
        return float(expect_str(value[FLOAT_MARKER]))
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"an optimizer state that is no number: {shown(value)}")
    return value


def check_consistent(index: Index) -> None:
    """Raise `ValueError` unless all tensors are inside the listed files, and all states belong to a parameter."""
    for family in FAMILIES:
        for name, entry in index.tensors[family].items():
            placed, file = entry.placed, index.files.get(entry.placed.file)
            if file is None or not file.header_bytes <= placed.offset <= file.nbytes - placed.spec.nbytes:
                raise ValueError(f"{shown(name)} lies outside of the file {shown(placed.file)}")
    _check_apart(index)
    model = set(index.tensors[MODEL])
    states = (name.partition("/")[2] for name in index.tensors[OPTIMIZER])
    owners = {*index.aliases, *states, *(name for values in index.scalars.values() for name in values)}
    if not owners <= model:
        raise ValueError(f"parameters that are not there: {shown(sorted(owners - model)[:10])}")


def _check_apart(index: Index) -> None:
    """Raise `ValueError` where two tensors share bytes: a small file would stand for tensors of any size."""
    places: dict[str, list[tuple[int, int, str]]] = {}
    for family in FAMILIES:
        for name, entry in index.tensors[family].items():
            places.setdefault(entry.placed.file, []).append((entry.placed.offset, entry.spec.nbytes, name))
    for found in places.values():
        found.sort()
        for (begin, nbytes, name), (following, _, other) in pairwise(found):
            if begin + nbytes > following:
                raise ValueError(f"{shown(name)} and {shown(other)} lie over each other")
