"""The contents of a checkpoint as names, shapes and functions that return single tensors; and a function that writes
them as a checkpoint of dsx.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..agreeing import agree
from ..announcing import MODEL_KEY, ClientTensor, HoldingBuilder, Known, stored_name
from ..boxes import Region
from ..encode import encode
from ..errors import CheckpointCorruptError, CheckpointError, shown
from ..extra_state import is_extra_state
from ..folder import check_folder, check_tag, temporary_name
from ..format import CHUNK_BYTES, CLIENT, DTYPES, MASTER, MODEL, OPTIMIZER, TensorSpec, dtype_name
from ..keeping import Keeping
from ..plan import MAX_FILE_BYTES
from ..ranks import Solo
from ..reading import Reader
from ..snapshot import Piece, Snapshot
from ..writing import PlannedSave

__all__ = ["Source", "Tensor", "numbers_of_group", "of_reader", "write_source"]

Progress = Callable[[int, int], None]
"""Called with the bytes that are done, and the total."""


@dataclass(frozen=True)
class Tensor:
    """A whole tensor that is read when `fetch` is called, in the shape and dtype of `spec`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[], torch.Tensor]

    @staticmethod
    def of(value: torch.Tensor) -> Tensor:
        """A tensor that is in memory already, or mapped into memory."""
        return Tensor(tuple(value.shape), value.dtype, lambda: value)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class Source:
    """Everything of one checkpoint.

    Attributes:
        kind: the program that wrote it, as text.
        parameters: whole parameters by name.
        buffers: persistent buffers by name.
        masters: parameters in full precision, where the model's precision is lower.
        states: parameter -> state -> tensor of the parameter's shape, or a number.
        aliases: parameter -> its other names.
        frozen: parameters that are not trained.
        engine: the training state, in the form of `TrainingState`; None if there is none.
        client: the caller's state.
    """

    kind: str
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor | int | float]] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    engine: dict[str, Any] | None = None
    client: dict[str, Any] = field(default_factory=dict)

    def full_precision(self, name: str) -> Tensor:
        """The master of a parameter, or the parameter itself if it has none."""
        return self.masters.get(name, self.parameters[name])

    def weights(self, *, masters: bool = False, aliases: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers; tied ones under all their names if `aliases`."""
        for name, tensor in self.parameters.items():
            value = self.full_precision(name) if masters else tensor
            for key in (name, *(self.aliases.get(name, ()) if aliases else ())):
                yield key, value
        yield from self.buffers.items()


def numbers_of_group(group: Mapping[Any, Any]) -> dict[str, Any]:
    """The numbers of an optimizer's parameter group, in the form of `TrainingState`: rates, betas, ..."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        plain = tuple(value) if isinstance(value, (list, tuple)) else value
        items = plain if isinstance(plain, tuple) else (plain,)
        if name != "params" and items and all(type(item) in (int, float) for item in items):
            found[str(name)] = plain
    return found


def write_source(
    source: Source,
    directory: str | os.PathLike[str],
    tag: str,
    *,
    latest: bool = True,
    progress: Progress = lambda done, total: None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write it as a checkpoint of dsx, one tensor at a time; returns its folder.

    Raises:
        CheckpointError: it cannot be written, or does not fit together.
    """
    target = check_folder(directory, "directory") / check_tag(tag)
    if (target / "dsx.json").exists():
        raise CheckpointError(f"{target}: there is a checkpoint already; choose another tag")
    _check_fits(source)
    snapshot, builder = Snapshot(), HoldingBuilder()
    snapshot.catalogue, snapshot.holding = builder.catalogue, builder.holding

    def add(family: str, name: str, tensor: Tensor) -> None:
        spec, region = TensorSpec(name, dtype_name(tensor.dtype), tensor.shape), Region.whole(tensor.shape)
        if region.numel:
            fetch = functools.partial(_checked, name, tensor)
            snapshot.pieces.append(Piece(family, spec, region, fetch, in_memory=False))

    def hold(name: str, key: str, tensor: Tensor) -> None:
        builder.hold(name, key, dtype_name(tensor.dtype), Region.whole(tensor.shape))
        add(*stored_name(key, name), tensor)

    for name, tensor in {**source.parameters, **source.buffers}.items():
        spec = TensorSpec(name, dtype_name(tensor.dtype), tensor.shape)
        aliases = source.aliases.get(name, ()) if name in source.parameters else None
        master = source.masters.get(name) if name in source.parameters else None
        builder.know(name, Known(spec, frozen=name in source.frozen, aliases=aliases))
        hold(name, MODEL_KEY, tensor)
        if master is not None and master.dtype != tensor.dtype:
            hold(name, MASTER, master)
        for key, value in source.states.get(name, {}).items():
            if isinstance(value, Tensor):
                hold(name, key, value)
            else:
                builder.number(name, key)
                snapshot.numbers.setdefault(key, []).append(value)
    builder.finish()
    tensors: dict[str, torch.Tensor] = {}
    state = {"client": source.client, **({} if source.engine is None else {"engine": source.engine})}
    encoded = encode(state, "state", tensors)
    for name, value in tensors.items():
        snapshot.holding.client.append(ClientTensor(name, dtype_name(value.dtype), tuple(value.shape)))
        add(CLIENT, name, Tensor.of(value))
    agreed = agree(Solo(), lambda: (snapshot, ""), max_file_bytes=max_file_bytes, chunk_bytes=CHUNK_BYTES)
    temporary = target.with_name(temporary_name(target.name, agreed.unique))
    counted = _counting(snapshot.pieces, progress)
    return PlannedSave(agreed.plan, agreed.whole, counted, encoded, temporary, target, latest, Keeping()).run(Solo())


def _check_fits(source: Source) -> None:
    """Raise `CheckpointCorruptError` if masters or states belong to no parameter, or have another shape than theirs."""
    for name in (*source.masters, *source.states):
        if name not in source.parameters:
            raise CheckpointCorruptError(
                f"{source.kind}: has a master or optimizer states of {shown(name)}, and no such parameter"
            )
        found = {"master": source.masters.get(name), **source.states.get(name, {})}
        for key, value in found.items():
            if isinstance(value, Tensor) and tuple(value.shape) != tuple(source.parameters[name].shape):
                raise CheckpointCorruptError(
                    f"{shown(name)}: {shown(key)} has shape {tuple(value.shape)}, expected that of the parameter,"
                    f" {tuple(source.parameters[name].shape)}"
                )


def _checked(name: str, tensor: Tensor) -> torch.Tensor:
    value = tensor.fetch().detach().reshape(-1)
    if value.numel() != torch.Size(tensor.shape).numel() or value.dtype != tensor.dtype:
        raise CheckpointError(
            f"{shown(name)}: got {value.numel()} values of {value.dtype}, expected shape {tensor.shape} of"
            f" {tensor.dtype}"
        )
    return value


def _counting(pieces: list[Piece], progress: Progress) -> list[Piece]:
    """The pieces, which report the progress of the write when they are read."""
    total, done = sum(piece.spec.nbytes for piece in pieces), 0

    def counted(piece: Piece) -> Piece:
        def fetch() -> torch.Tensor:
            nonlocal done
            value = piece.fetch()
            done += piece.spec.nbytes
            progress(done, total)
            return value

        return Piece(piece.family, piece.spec, piece.region, fetch, in_memory=piece.in_memory)

    return [counted(piece) for piece in pieces]


def of_reader(reader: Reader) -> Source:
    """A checkpoint of dsx, of any version, as a source; every tensor is verified when it is read."""
    index = reader.index
    model, aliases = index.tensors[MODEL], dict(index.aliases)

    def part(family: str, name: str) -> Tensor:
        spec = index.tensors[family][name].spec
        dtype: torch.dtype = getattr(torch, DTYPES[spec.dtype][0])
        return Tensor(spec.shape, dtype, lambda: reader.stored(family, name))

    found = Source(
        kind=f"dsx, format version {index.version}",
        parameters={name: part(MODEL, name) for name in model if name in aliases},
        buffers={name: part(MODEL, name) for name in model if name not in aliases and not is_extra_state(name)},
        aliases=aliases,
    )
    for stored in index.tensors[OPTIMIZER]:
        key, _, name = stored.partition("/")
        if key == MASTER:
            found.masters[name] = part(OPTIMIZER, stored)
        else:
            found.states.setdefault(name, {})[key] = part(OPTIMIZER, stored)
    for key, values in index.scalars.items():
        for name, value in values.items():
            found.states.setdefault(name, {})[key] = value
    state = reader.state_of_caller()
    found.engine, found.client = state.get("engine"), state.get("client", {})
    return found
