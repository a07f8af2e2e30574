"""Checkpoints of torch.distributed.checkpoint, as FSDP programs write them.

`.metadata` is a pickle; it is read with an unpickler that makes only the classes of this format. It lists the tensors,
their chunks, and the place of each chunk. A chunk is a result of `torch.save`, or a file of safetensors.

Names: a state under `model` (also `module`, `state_dict`) gives the weights, one under `optim` or `optimizer` with the
layout of `torch.distributed.checkpoint.state_dict`, nested or flattened, the optimizer states and the numbers of the
parameter groups. Both may lie in one more dictionary (`app`). Without such a top level, all tensors are weights.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..boxes import Box, Region, why_not_a_tiling
from ..checks import expect_int
from ..errors import CheckpointCorruptError, CheckpointError, shown
from ..files import opened
from ..format import TensorSpec, dtype_name
from .limits import check_expansion
from .source import Source, Tensor, numbers_of_group
from .unpickling import Opaque, read_bytes, unpickle

logger = logging.getLogger("dsx.checkpoint")

__all__ = ["METADATA", "read_dcp"]

METADATA = ".metadata"
_MODEL, _OPTIMIZER = ("model", "module", "state_dict"), ("optim", "optimizer", "optimizers")


class _Record(Opaque):
    """An object of the format, with its saved attributes. As a key of a dictionary it is equal to itself only."""


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
    """A box of a tensor, and the place of its bytes."""

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
    try:
        check_expansion([entries, places, paths])
    except ValueError as error:
        raise CheckpointCorruptError(f"{folder / METADATA}: {error}") from error
    where: dict[str, list[tuple[tuple[int, ...] | None, Any]]] = {}
    for index, info in places.items():
        offset = index.value("offset")
        where.setdefault(index.value("fqn"), []).append((None if offset is None else tuple(offset), info))
    lost = sorted(map(str, where.keys() - entries.keys()))
    if lost:
        raise CheckpointCorruptError(f"{folder}: the metadata gives places of {shown(lost[0])}, and no such tensor")
    source, groups = Source(kind="torch.distributed.checkpoint"), _Groups()
    for name, entry in entries.items():
        path = _without_wrapper(tuple(map(str, paths[name])) if name in paths else tuple(name.split(".")))
        chunks = entry.value("chunks")
        if chunks is not None:
            _add(source, groups, path, _tensor(folder, name, entry, chunks, dict(where.get(name, ()))))
        elif path[0] in _OPTIMIZER:  # other programs' objects are of no use, and none is read that is not needed
            _add(source, groups, path, _plain(folder, name, where))
    if not source.parameters:
        raise CheckpointError(f"{folder}: has no weights; expected a state under one of {', '.join(_MODEL)}")
    _leave_out_states(source)
    if source.states:
        source.engine = _training_state(source, groups)
    return source


def _leave_out_states(source: Source) -> None:
    """Keep the states that an optimizer of dsx can have: of a parameter's own shape. What is left out, is logged."""
    strange = dict.fromkeys(name for name in source.states if name not in source.parameters)
    for name, states in source.states.items():
        whole = source.parameters.get(name)
        if whole and any(isinstance(s, Tensor) and tuple(s.shape) != tuple(whole.shape) for s in states.values()):
            strange[name] = None
    if strange:
        logger.warning(
            "import: optimizer states of %d of %d names are left out, such as those of %s: there are no weights of this"
            " name and shape", len(strange), len(source.states), shown(next(iter(strange))),
        )  # fmt: skip
    source.states = {name: states for name, states in source.states.items() if name not in strange}


@dataclass
class _Groups:
    """The optimizer's parameter groups in the file: by number, or flattened by parameter."""

    by_number: dict[int, dict[str, Any]] = field(default_factory=dict)
    by_parameter: dict[str, dict[str, Any]] = field(default_factory=dict)

    def numbers(self) -> list[dict[str, Any]]:
        """The numbers of each group. Flattened groups cannot be told apart: one group, if all parameters have the same
        numbers.
        """
        if self.by_number:
            return [numbers_of_group(self.by_number[number]) for number in sorted(self.by_number)]
        found = [numbers_of_group(group) for group in self.by_parameter.values()]
        return found[:1] if found and all(one == found[0] for one in found) else []


def _without_wrapper(path: tuple[str, ...]) -> tuple[str, ...]:
    """A program may keep model and optimizer in one object that it calls as it likes: `app.model.weight`."""
    known = (*_MODEL, *_OPTIMIZER)
    return path[1:] if len(path) > 2 and path[0] not in known and path[1] in known else path


def _add(source: Source, groups: _Groups, path: tuple[str, ...], value: Any) -> None:
    """Sort a value in by its path."""
    top, rest = path[0], path[1:]
    if len(rest) == 1 and top in _OPTIMIZER and rest[0].startswith(("state.", "param_groups.")):
        kind, _, tail = rest[0].partition(".")
        name, _, key = tail.rpartition(".")
        rest = (kind, name, key)  # the flattened layout
    if top in _OPTIMIZER and rest[:1] == ("state",) and len(rest) >= 3:
        plain = value.fetch().item() if isinstance(value, Tensor) and not value.shape else value
        if isinstance(plain, (Tensor, int, float)):
            source.states.setdefault(".".join(rest[1:-1]), {})[rest[-1]] = plain
    elif top in _OPTIMIZER and rest[:1] == ("param_groups",) and len(rest) >= 3:
        name = ".".join(rest[1:-1])
        if name.isdecimal():
            groups.by_number.setdefault(int(name), {})[rest[-1]] = value
        else:
            groups.by_parameter.setdefault(name, {})[rest[-1]] = value
    elif top in _OPTIMIZER or not isinstance(value, Tensor):
        return
    else:
        name = ".".join(rest if top in _MODEL and rest else path)
        if name in source.parameters:
            raise CheckpointError(f"{shown(name)} stands twice, under {shown(top)} and elsewhere; import one model")
        source.parameters[name] = value


def _training_state(source: Source, groups: _Groups) -> dict[str, Any]:
    """The training state for an engine: the number of updates, as the optimizer has counted them, and rates."""
    counted = (states.get("step") for states in source.states.values())
    steps = max((int(step) for step in counted if isinstance(step, (int, float))), default=0)
    return {
        "counters": {"global_steps": steps, "global_samples": 0, "skipped_steps": 0, "micro_steps": steps},
        "param_groups": groups.numbers(), "precision": {}, "lr_scheduler": {}, "loss_scaler": {"kind": "none"},
        "data": {}, "config": {}, "versions": {},
    }  # fmt: skip


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
    _check_chunks(folder, TensorSpec(name, dtype_name(dtype), tuple(map(expect_int, shape))), found)

    def fetch() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        for chunk in found:
            value = _read(chunk, name)
            if tuple(value.shape) != chunk.sizes:
                raise CheckpointCorruptError(f"{chunk.file}: a chunk of {shown(name)} has shape {tuple(value.shape)}")
            whole[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes))] = value
        return whole

    return Tensor(shape, dtype, fetch)


def _check_chunks(folder: Path, spec: TensorSpec, chunks: list[_Chunk]) -> None:
    """Raise `CheckpointCorruptError` unless the chunks are the whole tensor, once, and their files have as many bytes:
    before anything is made in its size.
    """
    boxes = [Box(tuple(map(expect_int, chunk.offsets)), tuple(map(expect_int, chunk.sizes))) for chunk in chunks]
    wrong = why_not_a_tiling(spec.shape, [Region(box, 0, box.numel) for box in boxes])
    places = {(chunk.file, chunk.at): chunk.length for chunk in chunks}
    if wrong or len(places) != len(chunks):
        why = wrong or "two of them lie in one place"
        raise CheckpointCorruptError(f"{folder}: the chunks of {shown(spec.name)} are not the whole tensor: {why}")
    sizes = {file: file.stat().st_size for file, _ in places}
    if spec.nbytes > sum(places.values()) or any(at + length > sizes[file] for (file, at), length in places.items()):
        raise CheckpointCorruptError(f"{folder}: the files have fewer bytes than {shown(spec.name)}: cut short")


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


def _plain(folder: Path, name: str, where: dict[str, list[tuple[Any, Any]]]) -> Any:
    """A value that is not a tensor, if it is a number or a tuple of numbers; otherwise None."""
    for _, info in where.get(name, ()):
        value = read_bytes(_bytes(*_place(folder, info)), f"{folder}: {shown(name)}")
        if type(value) in (int, float, tuple, list):
            return value
    return None
