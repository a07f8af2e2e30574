"""Whether a checkpoint fits a model: names that are missing on either side, shapes, and kinds of numbers.

Each rank compares the names that it holds; rank 0 puts the differences of all ranks together. So a rank sends the names
that it misses, and of all others a bit.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import CheckpointError
from .extra_state import EXTRA_SHAPE, modules_with_extra_state
from .format import DTYPES, MODEL, TensorSpec
from .reading import Reader
from .snapshot import Place, persistent_buffers

MOST_SHOWN = 10  # names in an error


def _unfit(text: str) -> CheckpointError:
    return CheckpointError(text, code="DSX503")


def wanted(
    module: nn.Module, slices: Iterable[Any], places: Mapping[str, Place]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name here -> shape of the whole tensor and dtype here, of every parameter and buffer.

    Args:
        slices: the optimizer's (`Loadable.slices`).
    """
    found = {part.name: (tuple(part.shape), part.param.dtype) for part in slices}
    found |= {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in persistent_buffers(module)}
    found |= {name: (EXTRA_SHAPE, torch.uint8) for name, _ in modules_with_extra_state(module)}
    return {name: (Place.of(name, shape, places).shape, dtype) for name, (shape, dtype) in found.items()}


@dataclass(frozen=True)
class Differences:
    """The difference between a rank's names and those of a checkpoint.

    Attributes:
        missing: names of the model that the checkpoint does not have; where that is an error, as many as it shows.
        names: a hash of the checkpoint's names of parameters and buffers.
        held: which of these this rank has, as bits: the first name is the lowest bit. None: it does not matter.
    """

    missing: tuple[str, ...]
    names: bytes
    held: int | None


def compare(reader: Reader, wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Differences:
    """Names that this rank misses in the checkpoint, and names in it that this rank has."""
    wrong = []
    for name, (shape, dtype) in wanted.items():
        spec = reader.spec_of(name) if reader.selection.selects(name) else None
        if spec is not None and spec.shape != shape and not _differs_in_rows(reader, name, spec.shape, shape):
            wrong.append(f"{name}: {spec.shape} in the checkpoint, {shape} in the model")
        elif spec is not None and not _same_kind(spec, dtype):
            wrong.append(f"{name}: {spec.dtype} in the checkpoint, {dtype} in the model")
        else:
            continue
        reader.unfit.add(name)
    if wrong and reader.selection.weights:
        raise _unfit(f"{reader.folder}: tensors do not fit: {'; '.join(wrong[:MOST_SHOWN])}")
    stored = {name: reader.name_of(name) for name in wanted}
    missing = tuple(
        n for n in wanted if reader.selection.wants(n) and not reader.has(n) and stored[n] not in reader.index.excluded
    )
    names = list(reader.index.tensors[MODEL])
    if not (reader.selection.weights and reader.selection.only is None):  # a selection leaves out names on purpose
        return Differences(missing, _digest(names), None)
    held = set(stored.values())
    bits = "".join("1" if name in held else "0" for name in reversed(names))
    return Differences(missing, _digest(names), int(bits or "0", 2))


def _digest(names: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(names).encode("utf-8", "surrogatepass")).digest()[:16]


def _differs_in_rows(reader: Reader, name: str, stored: tuple[int, ...], here: tuple[int, ...]) -> bool:
    """Is this a tensor that may have another number of rows, and does only that differ?"""
    return reader.selection.may_pad(name) and len(stored) == len(here) > 0 and stored[1:] == here[1:]


def merge(
    folder: Path, ranks: Sequence[Differences], names: Sequence[str], strict: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that any rank misses, and those of the checkpoint's `names` that no rank has. Raises `CheckpointError`
    if `strict` and there are any, or if ranks see different checkpoints.
    """
    other = next((rank for rank, found in enumerate(ranks) if found.names != ranks[0].names), None)
    if other is not None:
        raise CheckpointError(
            f"{folder}: rank {other} reads another checkpoint than rank 0: another job saves there, or the ranks do "
            "not see the same folder; load again"
        )
    missing = tuple(dict.fromkeys(name for found in ranks for name in found.missing))
    unexpected: tuple[str, ...] = ()
    if all(found.held is not None for found in ranks):
        held = functools.reduce(operator.or_, (found.held or 0 for found in ranks))
        if held != (1 << len(names)) - 1:
            unexpected = tuple(sorted(name for number, name in enumerate(names) if not held >> number & 1))
    if strict and (missing or unexpected):
        raise _unfit(
            f"{folder}: names differ: missing in the checkpoint: {list(missing[:MOST_SHOWN])}; not in the model: "
            f"{list(unexpected[:MOST_SHOWN])}; pass load_module_strict=False to load what fits"
        )
    return missing, unexpected


def _same_kind(spec: TensorSpec, dtype: torch.dtype) -> bool:
    """Does a conversion keep the meaning of the values: floats to floats, integers to integers?"""
    return _kind(getattr(torch, DTYPES[spec.dtype][0])) == _kind(dtype)


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"
