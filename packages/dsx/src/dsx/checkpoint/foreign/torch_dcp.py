"""Checkpoints of torch.distributed.checkpoint, as FSDP programs write them.

`.metadata` is a pickle; it is read with an unpickler that knows the classes of this format and nothing else. It says
which tensors there are, in which chunks, and where each chunk lies. A chunk is what `torch.save` writes, or a file of
safetensors.

Names: a state under `model` (also `module`, `state_dict`) gives the weights, one under `optim` or `optimizer` with the
layout of `torch.distributed.checkpoint.state_dict` the optimizer states. Without such a top level, all tensors are
weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointCorruptError, CheckpointError, shown
from ..files import opened
from .source import Source, Tensor
from .unpickling import Opaque, read_bytes, unpickle

__all__ = ["METADATA", "read_dcp"]

METADATA = ".metadata"
_MODEL, _OPTIMIZER = ("model", "module", "state_dict", "app.model"), ("optim", "optimizer", "optimizers")


class _Record(Opaque):
    """An object of the format: what it was made from, as attributes."""

    def __hash__(self) -> int:
        return hash(repr((self.made_from, self.state)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Record) and (self.made_from, self.state) == (other.made_from, other.state)


_CLASSES = frozenset(
    ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
     "MetadataIndex", "StorageMeta", "_StorageInfo", "_StoragePrefix", "_MEM_FORMAT_ENCODING")
)  # fmt: skip


def _known(module: str, name: str) -> Any:
    if module.startswith("torch.distributed.checkpoint.") and name in _CLASSES:
        return _Record
    return None


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor, and where its bytes lie."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    at: int
    length: int


def read_dcp(folder: Path) -> Source:
    """A folder with `.metadata` as a source.

    Raises:
        CheckpointError: it is damaged, or has no weights.
    """
    metadata = unpickle(folder / METADATA, _known)
    if not isinstance(metadata, _Record):
        raise CheckpointCorruptError(f"{folder / METADATA}: is no metadata of torch.distributed.checkpoint")
    entries, places = metadata.value("state_dict_metadata") or {}, metadata.value("storage_data") or {}
    paths = metadata.value("planner_data") or {}
    where: dict[str, list[tuple[tuple[int, ...] | None, Any]]] = {}
    for index, info in places.items():
        offset = index.value("offset")
        where.setdefault(index.value("fqn"), []).append((None if offset is None else tuple(offset), info))
    source = Source(kind="torch.distributed.checkpoint")
    for name, entry in entries.items():
        path = tuple(map(str, paths[name])) if name in paths else tuple(name.split("."))
        chunks = entry.value("chunks")
        if chunks is None:
            _add(source, path, _number(folder, name, where))
        else:
            _add(source, path, _tensor(folder, name, entry, chunks, dict(where.get(name, ()))))
    if not source.parameters:
        raise CheckpointError(f"{folder}: has no weights; expected a state under one of {', '.join(_MODEL)}")
    source.states = {name: states for name, states in source.states.items() if name in source.parameters}
    return source


def _add(source: Source, path: tuple[str, ...], value: Tensor | int | float | None) -> None:
    """Sort a value in by its path."""
    if value is None:
        return
    top, rest = path[0], path[1:]
    if top in _OPTIMIZER and rest[:1] == ("state",) and len(rest) >= 3:
        name, key = ".".join(rest[1:-1]), rest[-1]
        plain = value.fetch().item() if isinstance(value, Tensor) and not value.shape else value
        source.states.setdefault(name, {})[key] = plain
    elif top in _OPTIMIZER or not isinstance(value, Tensor):
        return
    elif top in _MODEL and rest:
        source.parameters[".".join(rest)] = value
    else:
        source.parameters[".".join(path)] = value


def _tensor(folder: Path, name: str, entry: Any, chunks: Any, where: dict[Any, Any]) -> Tensor:
    properties, shape = entry.value("properties"), tuple(entry.value("size"))
    dtype = properties.value("dtype") if isinstance(properties, _Record) else None
    state = properties.state if isinstance(properties, _Record) else None
    if dtype is None and isinstance(state, tuple) and state and isinstance(state[0], torch.dtype):
        dtype = state[0]
    if not isinstance(dtype, torch.dtype):
        raise CheckpointCorruptError(f"{folder}: nothing says of which dtype {shown(name)} is")
    found = []
    for chunk in chunks:
        offsets, sizes = tuple(chunk.value("offsets")), tuple(chunk.value("sizes"))
        info = where.get(offsets, where.get(None))
        if info is None:
            raise CheckpointCorruptError(f"{folder}: the chunk at {offsets} of {shown(name)} is nowhere")
        found.append(_Chunk(offsets, sizes, *_place(folder, info)))

    def fetch() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        covered = 0
        for chunk in found:
            value = _read(chunk, name)
            if tuple(value.shape) != chunk.sizes:
                raise CheckpointCorruptError(f"{chunk.file}: a chunk of {shown(name)} has shape {tuple(value.shape)}")
            whole[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes))] = value
            covered += value.numel()
        if covered != whole.numel():
            raise CheckpointCorruptError(f"{folder}: the chunks of {shown(name)} are not the whole tensor")
        return whole

    return Tensor(shape, dtype, fetch)


def _place(folder: Path, info: Any) -> tuple[Path, int, int]:
    relative, at, length = info.value("relative_path"), info.value("offset"), info.value("length")
    if not isinstance(relative, str) or relative != Path(relative).name or relative.startswith("."):
        raise CheckpointCorruptError(f"{folder}: the metadata names a file outside of it, {shown(relative)}")
    if type(at) is not int or type(length) is not int or at < 0 or length < 0:
        raise CheckpointCorruptError(f"{folder}: the metadata gives no place in {relative}")
    return folder / relative, at, length


def _bytes(file: Path, at: int, length: int) -> bytes:
    with opened(file, os.O_RDONLY) as fd:
        if at + length > os.fstat(fd).st_size:
            raise CheckpointCorruptError(f"{file}: was cut short")
        return os.pread(fd, length, at)


def _read(chunk: _Chunk, name: str) -> torch.Tensor:
    data = _bytes(chunk.file, chunk.at, chunk.length)
    value = read_bytes(data, f"{chunk.file}: {shown(name)}")
    if not isinstance(value, torch.Tensor):
        raise CheckpointCorruptError(f"{chunk.file}: {shown(name)} is no tensor")
    return value


def _number(folder: Path, name: str, where: dict[str, list[tuple[Any, Any]]]) -> int | float | None:
    """A value that is no tensor, if it is a number."""
    for _, info in where.get(name, ()):
        value = read_bytes(_bytes(*_place(folder, info)), f"{folder}: {shown(name)}")
        if type(value) in (int, float):
            return value
    return None
