"""Weights alone: files of safetensors, and files of `torch.save` with a state dict.

A state dict may be inside a dictionary under one of the usual names (`state_dict`, `model`, `module`, ...). Such files
do not tell buffers from parameters; when the engine loads them, its own model decides.

Where a folder has an index of Hugging Face (`model.safetensors.index.json`), it says which files there are, and which
tensors. Without one, numbers in the names (`model-00001-of-00003`) say how many files there were.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from dsx_core import strict_json

from ..checks import expect_file_name, expect_int
from ..errors import CheckpointCorruptError, CheckpointError, shown, words_of
from ..files import opened, read_text
from ..format import DTYPES, Placed, TensorSpec
from ..regions import read_whole
from .source import Source, Tensor
from .unpickling import read_file

logger = logging.getLogger("dsx.checkpoint")

__all__ = ["read_plain"]

_MOST_HEADER = 100 << 20  # bytes; the same limit as in other readers of safetensors
_INSIDE = ("state_dict", "model_state_dict", "model", "module", "weights")


_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\..+)")


def read_plain(path: Path) -> Source:
    """One file, or all safetensors (or else all `pytorch_model*.bin`) of a folder.

    Raises:
        CheckpointError: there are no tensors, two files have the same name, or a file or a tensor of the index is
            missing.
    """
    listed = {} if path.is_file() else _listed(path)
    files = [path] if path.is_file() else [path / name for name in listed] or _in_folder(path)
    source = Source(kind="a state dict")
    for file in files:
        found = _safetensors(file) if file.suffix == ".safetensors" else _state_dict(file)
        twice = found.keys() & source.parameters.keys()
        if twice:
            raise CheckpointError(f"{file}: {shown(sorted(twice)[0])} stands in another file too")
        lost = listed.get(file.name, set()) - found.keys()
        if lost:
            raise CheckpointCorruptError(f"{file}: has no {shown(sorted(lost)[0])}, which the index says lies there")
        source.parameters.update(found)
    if not source.parameters:
        raise CheckpointError(f"{path}: has no tensors; expected a state dict")
    return source


def _listed(folder: Path) -> dict[str, set[str]]:
    """File -> the tensors in it, of the folder's index; empty if there is no index."""
    stem = "model.safetensors" if any(folder.glob("*.safetensors*")) else "pytorch_model.bin"
    found = sorted(folder.glob(f"*{stem.partition('.')[2]}.index.json"))
    usual = [path for path in found if path.name == f"{stem}.index.json"] or found
    if not usual:
        return {}
    if len(usual) > 1:
        raise CheckpointError(f"{folder}: has several indexes, {', '.join(p.name for p in found)}; keep one of them")
    index = usual[0]
    listed: dict[str, set[str]] = {}
    try:
        for name, file in json.loads(read_text(index))["weight_map"].items():
            listed.setdefault(expect_file_name(file), set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{index}: is damaged ({words_of(error)})") from error
    lost = sorted(file for file in listed if not (folder / file).is_file())
    if lost or not listed:
        raise CheckpointError(
            f"{index}: lists {len(listed)} files, of which {len(lost)} are missing, such as {shown(lost[:1])}; download"
            " them, or the model would be a part of itself"
        )
    return listed


def _in_folder(folder: Path) -> list[Path]:
    """The files of a folder that has no index. Raises `CheckpointError` if their names say that others are missing."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    numbers: dict[tuple[str, int, str], set[int]] = {}
    for found in filter(None, (_PART.fullmatch(file.name) for file in files)):
        numbers.setdefault((found["stem"], int(found["count"]), found["suffix"]), set()).add(int(found["number"]))
    for (stem, count, suffix), there in numbers.items():
        if len(there) != count:
            raise CheckpointError(
                f"{folder}: has {len(there)} of the {count} files {stem}-...-of-{count:05}{suffix}; others are missing"
            )
    return files


def _state_dict(file: Path) -> dict[str, Tensor]:
    data = read_file(file)
    for key in _INSIDE:
        if isinstance(data, Mapping) and isinstance(data.get(key), Mapping):
            data = data[key]
            break
    if not isinstance(data, Mapping):
        raise CheckpointError(f"{file}: got {type(data).__name__}, expected a dictionary of tensors")
    left_out = [key for key, value in data.items() if _holds_tensors(value)]
    if left_out and any(isinstance(value, torch.Tensor) for value in data.values()):
        logger.warning(
            "import: %s: left out, because they are no tensors but hold some: %s", file, shown(list(map(str, left_out)))
        )
    return {n: Tensor.of(v) for n, v in data.items() if isinstance(n, str) and isinstance(v, torch.Tensor)}


def _holds_tensors(value: Any) -> bool:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(isinstance(item, torch.Tensor) for item in inside)


def _safetensors(file: Path) -> dict[str, Tensor]:
    with opened(file, os.O_RDONLY) as fd:
        size = os.fstat(fd).st_size
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise CheckpointCorruptError(f"{file}: is no safetensors file, or was cut short")
        header = os.pread(fd, length, 8)
    try:
        entries: dict[str, Any] = strict_json.parse(header)
        placed = [_placed(file, n, e, 8 + length, size) for n, e in entries.items() if n != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{file}: its header is damaged ({words_of(error)})") from error
    at = 8 + length
    for one in sorted(placed, key=lambda p: (p.offset, p.spec.nbytes)):
        if one.offset != at:
            what = "lies over another tensor" if one.offset < at else "does not follow the tensor before it"
            raise CheckpointCorruptError(f"{file}: {shown(one.spec.name)} {what}")
        at += one.spec.nbytes
    if at != size:
        raise CheckpointCorruptError(f"{file}: {size - at} bytes at its end belong to no tensor; tensors are missing")
    return {p.spec.name: _tensor(file, p) for p in placed}


def _placed(file: Path, name: str, entry: dict[str, Any], begin: int, size: int) -> Placed:
    spec = TensorSpec(name, entry["dtype"], tuple(map(expect_int, entry["shape"])))
    first, last = map(expect_int, entry["data_offsets"])
    if last - first != spec.nbytes or begin + last > size:
        raise ValueError(f"the place of {shown(name)}")
    return Placed(spec, file.name, begin + first)


def _tensor(file: Path, placed: Placed) -> Tensor:
    dtype: torch.dtype = getattr(torch, DTYPES[placed.spec.dtype][0])
    return Tensor(placed.spec.shape, dtype, lambda: read_whole(file, placed))
