"""Weights alone: files of safetensors, and files of `torch.save` with a state dict.

A state dict may be inside a dictionary under one of the usual names (`state_dict`, `model`, `module`, ...). Such files
do not tell buffers from parameters; when the engine loads them, its own model decides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..checks import expect_int
from ..errors import CheckpointCorruptError, CheckpointError, shown
from ..files import opened
from ..format import DTYPES, Placed, TensorSpec
from ..regions import read_whole
from .source import Source, Tensor
from .unpickling import read_file

__all__ = ["read_plain"]

_MOST_HEADER = 100 << 20  # bytes; the same limit as in other readers of safetensors
_INSIDE = ("state_dict", "model_state_dict", "model", "module", "weights")


def read_plain(path: Path) -> Source:
    """One file, or all safetensors (or else all `pytorch_model*.bin`) of a folder.

    Raises:
        CheckpointError: there are no tensors, or two files have the same name.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    source = Source(kind="a state dict")
    for file in files:
        found = _safetensors(file) if file.suffix == ".safetensors" else _state_dict(file)
        twice = found.keys() & source.parameters.keys()
        if twice:
            raise CheckpointError(f"{file}: {sorted(twice)[0]!r} stands in another file too")
        source.parameters.update(found)
    if not source.parameters:
        raise CheckpointError(f"{path}: has no tensors; expected a state dict")
    return source


def _state_dict(file: Path) -> dict[str, Tensor]:
    data = read_file(file)
    for key in _INSIDE:
        if isinstance(data, Mapping) and isinstance(data.get(key), Mapping):
            data = data[key]
            break
    if not isinstance(data, Mapping):
        raise CheckpointError(f"{file}: got {type(data).__name__}, expected a dictionary of tensors")
    return {n: Tensor.of(v) for n, v in data.items() if isinstance(n, str) and isinstance(v, torch.Tensor)}


def _safetensors(file: Path) -> dict[str, Tensor]:
    with opened(file, os.O_RDONLY) as fd:
        size = os.fstat(fd).st_size
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise CheckpointCorruptError(f"{file}: is no safetensors file, or was cut short")
        header = os.pread(fd, length, 8)
    try:
        entries: dict[str, Any] = json.loads(header)
        placed = [_placed(file, n, e, 8 + length, size) for n, e in entries.items() if n != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{file}: its header is damaged ({error!r})") from error
    for one, following in pairwise(sorted(placed, key=lambda p: (p.offset, p.spec.nbytes))):
        if one.offset + one.spec.nbytes > following.offset:
            raise CheckpointCorruptError(
                f"{file}: {shown(one.spec.name)} and {shown(following.spec.name)} lie over each other"
            )
    return {p.spec.name: _tensor(file, p) for p in placed}


def _placed(file: Path, name: str, entry: dict[str, Any], begin: int, size: int) -> Placed:
    spec = TensorSpec(name, entry["dtype"], tuple(map(expect_int, entry["shape"])))
    first, last = map(expect_int, entry["data_offsets"])
    if last - first != spec.nbytes or begin + last > size:
        raise ValueError(f"the place of {name!r}")
    return Placed(spec, file.name, begin + first)


def _tensor(file: Path, placed: Placed) -> Tensor:
    dtype: torch.dtype = getattr(torch, DTYPES[placed.spec.dtype][0])
    return Tensor(placed.spec.shape, dtype, lambda: read_whole(file, placed))
