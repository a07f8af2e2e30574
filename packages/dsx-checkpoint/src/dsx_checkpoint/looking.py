"""Describes a checkpoint, and the differences of two, from their indexes alone and without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import nothing_committed
from .files import read_text
from .folder import find_checkpoint, meant_as_latest, resolve_tag, tags_in
from .format import DTYPES, FAMILIES, INDEX_NAME, LATEST_NAME, MASTER, MODEL, OPTIMIZER, Entry, Index
from .parsing import parse_index
from .selecting import compiled

__all__ = ["Difference", "differences", "open_index", "summary", "tags_of", "tensor_lines"]


def open_index(root: Path, tag: str | None = None) -> tuple[Path, Index]:
    """Folder and index of a committed checkpoint; `root` may also be a tag's folder. Raises `CheckpointError`."""
    if tag is None and (root / INDEX_NAME).is_file():
        root, tag = root.parent, root.name
    found = resolve_tag(root, tag)
    if found is None:
        raise nothing_committed(f"{root}: has no checkpoints; expected a folder that save_checkpoint has written")
    folder = find_checkpoint(root, found)
    return folder, parse_index(read_text(folder / INDEX_NAME), str(folder / INDEX_NAME))


def tags_of(root: Path) -> list[str]:
    """A line for each checkpoint in a folder, the youngest first; the one that `latest` names is marked."""
    latest = read_text(root / LATEST_NAME).strip() if (root / LATEST_NAME).is_file() else ""
    named = list(meant_as_latest(root))
    others = [tag for tag in tags_in(root) if tag not in named]
    return [f"{tag}{'  (latest)' if tag == latest else ''}" for tag in (*named, *others)]


def summary(folder: Path, index: Index) -> dict[str, Any]:
    """Plain values for people and programs."""
    saved = index.state.get("engine")
    engine: Mapping[str, Any] = saved if isinstance(saved, Mapping) else {}
    families = {family: _sizes(index.tensors[family]) for family in FAMILIES}
    states = sorted({name.partition("/")[0] for name in index.tensors[OPTIMIZER]} | index.scalars.keys())
    return {
        "checkpoint": str(folder),
        "version": index.version,
        "writer": index.writer,
        "bytes": sum(file.nbytes for file in index.files.values()),
        "files": len(index.files),
        "parameters": sum(e.spec.numel for n, e in index.tensors[MODEL].items() if n in index.aliases),
        "families": families,
        "optimizer_states": [state for state in states if state != MASTER],
        "masters": any(name.startswith(f"{MASTER}/") for name in index.tensors[OPTIMIZER]),
        "tied": sum(len(others) for others in index.aliases.values()),
        "excluded": len(index.excluded),
        "ranks": len(index.ranks),
        **{key: engine[key] for key in ("counters", "precision", "versions", "layout") if engine.get(key)},
        "client": sorted(map(str, client)) if isinstance(client := index.state.get("client"), Mapping) else [],
    }


def _sizes(entries: Mapping[str, Entry]) -> dict[str, Any]:
    by_dtype: dict[str, int] = {}
    for entry in entries.values():
        name = DTYPES[entry.spec.dtype][0]
        by_dtype[name] = by_dtype.get(name, 0) + entry.spec.nbytes
    return {"tensors": len(entries), "bytes": sum(by_dtype.values()), "dtypes": by_dtype}


def tensor_lines(index: Index, pattern: str = "") -> Iterator[str]:
    """A line for each tensor whose name has a match of the pattern."""
    wanted = compiled("pattern", pattern)
    for family in FAMILIES:
        for name, entry in index.tensors[family].items():
            if wanted.search(name):
                spec = entry.spec
                what = f"{DTYPES[spec.dtype][0]}{list(spec.shape)}"
                yield f"{family}  {name}  {what}  {spec.nbytes} bytes  {entry.placed.file}"


@dataclass(frozen=True)
class Difference:
    """One difference of two checkpoints. `what`: "only in first", "only in second", "shape", "dtype", "values" or
    "state".
    """

    what: str
    family: str
    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.family} {self.name}{f' ({self.detail})' if self.detail else ''}"


def differences(first: Index, second: Index) -> Iterator[Difference]:
    """Compare names, shapes, dtypes and hashes, and the state that is not tensors.

    Values are compared by hashes, if both checkpoints were hashed in chunks of the same size; format version 1 was not.
    """
    for family in FAMILIES:
        one, other = first.tensors[family], second.tensors[family]
        for name in (*one, *(name for name in other if name not in one)):
            if name not in other or name not in one:
                yield Difference(f"only in {'first' if name in one else 'second'}", family, name)
                continue
            yield from _compare(family, name, one[name], other[name])
    for key in sorted({*first.scalars, *second.scalars}):
        if first.scalars.get(key) != second.scalars.get(key):
            yield Difference("state", OPTIMIZER, key)
    yield from _compare_states("state", first.state, second.state)


def _compare(family: str, name: str, one: Entry, other: Entry) -> Iterator[Difference]:
    if one.spec.shape != other.spec.shape:
        yield Difference("shape", family, name, f"{list(one.spec.shape)} and {list(other.spec.shape)}")
    elif one.spec.dtype != other.spec.dtype:
        yield Difference("dtype", family, name, f"{DTYPES[one.spec.dtype][0]} and {DTYPES[other.spec.dtype][0]}")
    elif one.chunks != other.chunks:
        wrong = sum(a != b for a, b in zip(one.chunks.crcs, other.chunks.crcs))
        yield Difference("values", family, name, f"{wrong} of {len(one.chunks)} chunks")


def _compare_states(path: str, one: Any, other: Any) -> Iterator[Difference]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in (*one, *(key for key in other if key not in one)):
            if key not in one or key not in other:
                yield Difference(f"only in {'first' if key in one else 'second'}", "state", f"{path}.{key}")
            else:
                yield from _compare_states(f"{path}.{key}", one[key], other[key])
    elif one != other:
        yield Difference("state", "state", path, f"{_short(one)} and {_short(other)}")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
