"""Reading a checkpoint: every load is a re-shard.

A rank asks for the ranges it owns now; who wrote them, and in which stage or world size, does not matter. A load has two
steps: `prepare_load` reads, verifies (`verify=False` skips that) and compares everything, and all ranks agree that they have done so
well; `Prepared.install` changes the model. A checkpoint that is damaged or does not fit leaves every model as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from .encode import decode
from .errors import CheckpointCorruptError, CheckpointError, shown
from .files import opened, read_range, read_text
from .folder import check_folder, check_one_folder, find_checkpoint, resolve_tag
from .format import CLIENT, DTYPES, INDEX_NAME, LATEST_NAME, MODEL, OPTIMIZER, Index, Placed, TensorSpec
from .ranks import Ranks, default_ranks
from .verifying import check_files, check_slice
from .writing import persistent_buffers


class Loadable(Protocol):
    """What `load` fills: the sharded optimizer of dsx-zero."""

    def slices(self) -> Iterable[Any]: ...

    def read_slices(self, reader: Reader) -> Any:
        """Read without changing anything; what is returned has a collective `install()`."""
        ...


@dataclass(frozen=True)
class Loaded:
    """What was read beside the tensors."""

    path: Path
    state: dict[str, Any]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class Reader:
    """Ranges of tensors of one checkpoint, by the parameter's name (or a tied name of it).

    Answers None where the checkpoint has nothing, which means: keep what you have.
    """

    def __init__(self, folder: Path, index: Index, *, optimizer_states: bool = True, verify: bool = True) -> None:
        self.folder, self.index = folder, index
        self._optimizer_states, self._verify = optimizer_states, verify
        self._checked: set[tuple[str, int]] = set()
        self._canonical = {alias: name for name, others in index.aliases.items() for alias in others}
        self._keys: dict[str, list[str]] = {}  # parameter -> its states, so that asking for all of them is linear
        for key, _, name in (
            n.partition("/") for n, placed in index.tensors.items() if placed.file.startswith(OPTIMIZER)
        ):
            if key != "master":
                self._keys.setdefault(name, []).append(key)
        for key, values in index.scalars.items():
            for name in values:
                self._keys.setdefault(name, []).append(key)

    def name_of(self, name: str) -> str:
        """The name under which a parameter or buffer is stored, given any of its names."""
        return name if name in self.index.aliases else self._canonical.get(name, name)

    def has(self, name: str) -> bool:
        """Is there a parameter or buffer of this name?"""
        placed = self.index.tensors.get(self.name_of(name))
        return placed is not None and placed.file.startswith(MODEL)

    def param(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """Elements of the stored parameter, 1-D, in the stored dtype."""
        return self._read(self.name_of(name), start, stop)

    def master(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """Elements of the fp32 master; the parameter itself where it was stored in full precision."""
        found = self._read(f"master/{self.name_of(name)}", start, stop)
        return self.param(name, start, stop) if found is None else found

    def state_keys(self, name: str) -> tuple[str, ...]:
        """The optimizer states stored for a parameter; empty when they are not to be loaded."""
        return tuple(self._keys.get(self.name_of(name), ())) if self._optimizer_states else ()

    def state(self, key: str, name: str, start: int, stop: int) -> torch.Tensor | int | float | None:
        """A range of an optimizer state, or the number it is."""
        if not self._optimizer_states:
            return None
        scalar = self.index.scalars.get(key, {}).get(self.name_of(name))
        return scalar if scalar is not None else self._read(f"{key}/{self.name_of(name)}", start, stop)

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor in its logical shape (buffers, client tensors)."""
        spec = self.index.tensors[name].spec
        found = self._read(name, 0, spec.numel)
        if found is None:
            raise CheckpointError(f"{self.folder}: has no tensor {name!r}")
        return found.reshape(spec.shape)

    def client(self, name: str) -> torch.Tensor:
        """A tensor of the client state. Raises `CheckpointCorruptError` where there is none of this name."""
        placed = self.index.tensors.get(name)
        if placed is None or not placed.file.startswith(CLIENT):
            raise CheckpointCorruptError(f"{self.folder}: the state names a tensor {shown(name)} that is not there")
        return self.whole(name)

    def _read(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        placed = self.index.tensors.get(name)
        if placed is None:
            return None
        if not 0 <= start <= stop <= placed.spec.numel:
            raise CheckpointError(
                f"{name!r}: elements {start} to {stop} asked for, but the checkpoint's tensor has shape {placed.spec.shape}"
            )
        with opened(self.folder / placed.file, os.O_RDONLY) as fd:
            if self._verify:
                self._check(fd, placed, start, stop)
            return read_range(fd, placed, start, stop)

    def _check(self, fd: int, placed: Placed, start: int, stop: int) -> None:
        for part in self.index.slices[placed.spec.name]:
            key = (placed.spec.name, part.start)
            if key in self._checked or part.stop <= start or part.start >= stop:
                continue
            check_slice(fd, self.folder, placed, part.start, part.stop, part.hash)
            self._checked.add(key)


def open_checkpoint(directory: str | os.PathLike[str], tag: str | None = None, **options: Any) -> Reader:
    """A `Reader` of a committed checkpoint, in this process alone. Raises `CheckpointError`."""
    root = check_folder(directory, "open_checkpoint")
    found = resolve_tag(root, tag)
    if found is None:
        raise CheckpointError(f"{root}: no '{LATEST_NAME}' file; expected a folder that save_checkpoint has written")
    folder = find_checkpoint(root, found)
    return Reader(folder, Index.from_json(read_text(folder / INDEX_NAME), str(folder / INDEX_NAME)), **options)


@dataclass(frozen=True)
class Prepared:
    """A checkpoint that was read, verified and found to fit; the model is as it was until `install`."""

    loaded: Loaded
    _buffers: list[tuple[torch.Tensor, torch.Tensor]]
    _slices: Any

    def install(self) -> Loaded:
        """Write everything into the model and the optimizer. Collective, and only once."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        self._slices.install()
        return self.loaded


def prepare_load(
    directory: str | os.PathLike[str],
    tag: str | None = None,
    *,
    module: nn.Module,
    optimizer: Loadable,
    ranks: Ranks | None = None,
    strict: bool = True,
    optimizer_states: bool = True,
    verify: bool = True,
) -> Prepared | None:
    """Read and verify on every rank what `module` (buffers) and `optimizer` (parameters, masters, states) need; collective.

    Nothing is changed: an error on one rank is the same error on all, and leaves every model as it was.

    Returns:
        None when `directory` has no checkpoint and no tag was asked for.

    Raises:
        CheckpointError: there is something, but nothing that can be loaded. With `strict` also where names do not fit.
    """
    ranks = ranks or default_ranks()

    def resolve() -> tuple[str, str | None]:
        root = check_folder(directory, "load")
        return os.path.realpath(root), resolve_tag(root, tag)

    found = ranks.together("finding a checkpoint", resolve)
    check_one_folder("load", [path for path, _ in found])
    root, name = Path(directory), found[0][1]
    if name is None:
        return None

    def read() -> Prepared:
        reader = open_checkpoint(root, name, optimizer_states=optimizer_states, verify=verify)
        if verify and ranks.rank == 0:
            check_files(reader.folder, reader.index)
        missing, unexpected = _compare(reader, module, optimizer, strict)
        state = decode(reader.index.state, reader.client)
        buffers = [(b, reader.whole(n)) for n, b in persistent_buffers(module) if reader.has(n)]
        return Prepared(Loaded(reader.folder, state, missing, unexpected), buffers, optimizer.read_slices(reader))

    return ranks.all_or_none(f"reading {root / name}", read)


def load(directory: str | os.PathLike[str], tag: str | None = None, **options: Any) -> Loaded | None:
    """Fill a module and an optimizer from a checkpoint; arguments and errors are those of `prepare_load`. Collective.

    Names or shapes that do not fit raise `CheckpointError` before anything is changed; with `strict=False` what fits is loaded
    and the rest reported.
    """
    prepared = prepare_load(directory, tag, **options)
    return None if prepared is None else prepared.install()


def _compare(
    reader: Reader, module: nn.Module, optimizer: Loadable, strict: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    wanted = {part.name: (tuple(part.shape), part.param.dtype) for part in optimizer.slices()}
    wanted |= {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in persistent_buffers(module)}
    stored = {n: p.spec for n, p in reader.index.tensors.items() if p.file.startswith(MODEL)}
    pairs = [(n, stored[reader.name_of(n)], *kept) for n, kept in wanted.items() if reader.has(n)]
    wrong = [
        f"{n}: {spec.shape} in the checkpoint, {shape} in the model"
        for n, spec, shape, _ in pairs
        if spec.shape != shape
    ]
    wrong += [
        f"{n}: {spec.dtype} in the checkpoint, {dtype} in the model"
        for n, spec, _, dtype in pairs
        if not _same_kind(spec, dtype)
    ]
    if wrong:
        raise CheckpointError(f"{reader.folder}: tensors do not fit: {'; '.join(wrong[:10])}")
    missing = tuple(n for n in wanted if not reader.has(n) and n not in reader.index.excluded)
    known = {reader.name_of(n) for n in wanted}
    unexpected = tuple(n for n in stored if n not in known)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{reader.folder}: names differ: missing in the checkpoint: {list(missing[:10])}; not in the model: "
            f"{list(unexpected[:10])}; pass load_module_strict=False to load what fits"
        )
    return missing, unexpected


def _same_kind(spec: TensorSpec, dtype: torch.dtype) -> bool:
    """Does a conversion keep the meaning of the values: floats to floats, integers to integers?"""
    return _kind(getattr(torch, DTYPES[spec.dtype][0])) == _kind(dtype)


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"
