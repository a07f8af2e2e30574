"""Reading a checkpoint: every load is a re-shard.

A rank asks for the ranges it owns now; who wrote them, and in which stage or world size, does not matter. Hashes are
checked before a byte reaches the model (`verify=False` skips that), and names are compared before anything is changed: a
checkpoint that does not fit leaves the model as it was.
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
from .errors import CheckpointCorruptError, CheckpointError
from .files import hash_range, leftovers, opened, read_range
from .format import INDEX_NAME, LATEST_NAME, Index, Placed
from .ranks import Ranks, default_ranks, together
from .save import CLIENT, MODEL, OPTIMIZER, persistent_buffers


class Loadable(Protocol):
    """What `load` fills: the sharded optimizer of dsx-zero."""

    def slices(self) -> Iterable[Any]: ...

    def load_slices(self, reader: Reader) -> None: ...


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

    def _name(self, name: str) -> str:
        return name if name in self.index.aliases else self._canonical.get(name, name)

    def has(self, name: str) -> bool:
        """Is there a parameter or buffer of this name?"""
        return self._name(name) in self.index.tensors

    def param(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """Elements of the stored parameter, 1-D, in the stored dtype."""
        return self._read(self._name(name), start, stop)

    def master(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """Elements of the fp32 master; the parameter itself where it was stored in full precision."""
        found = self._read(f"master/{self._name(name)}", start, stop)
        return self.param(name, start, stop) if found is None else found

    def state_keys(self, name: str) -> tuple[str, ...]:
        """The optimizer states stored for a parameter; empty when they are not to be loaded."""
        return tuple(self._keys.get(self._name(name), ())) if self._optimizer_states else ()

    def state(self, key: str, name: str, start: int, stop: int) -> torch.Tensor | int | float | None:
        """A range of an optimizer state, or the number it is."""
        if not self._optimizer_states:
            return None
        scalar = self.index.scalars.get(key, {}).get(self._name(name))
        return scalar if scalar is not None else self._read(f"{key}/{self._name(name)}", start, stop)

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor in its logical shape (buffers, client tensors)."""
        spec = self.index.tensors[name].spec
        found = self._read(name, 0, spec.numel)
        if found is None:
            raise CheckpointError(f"{self.folder}: has no tensor {name!r}")
        return found.reshape(spec.shape)

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
            if hash_range(fd, placed, part.start, part.stop) != part.hash:
                raise CheckpointCorruptError(
                    f"{self.folder / placed.file}: the bytes of {placed.spec.name!r}, elements {part.start} to {part.stop}, are not "
                    "those that were saved; restore the file or load another tag"
                )
            self._checked.add(key)


def resolve_tag(directory: Path, tag: str | None) -> str | None:
    """`tag`, or what `latest` says. None when there is no checkpoint at all."""
    if tag is not None:
        return tag
    latest = directory / LATEST_NAME
    if latest.is_file():
        return latest.read_text().strip()
    if (directory / INDEX_NAME).is_file():
        raise CheckpointError(
            f"{directory} is one tag's folder; pass load_dir={directory.parent} and tag={directory.name!r}"
        )
    return None


def open_checkpoint(directory: str | os.PathLike[str], tag: str | None = None, **options: Any) -> Reader:
    """A `Reader` of a committed checkpoint, in this process alone. Raises `CheckpointError`."""
    root = Path(directory)
    found = resolve_tag(root, tag)
    if found is None:
        raise CheckpointError(f"{root}: no '{LATEST_NAME}' file; expected a folder that save_checkpoint has written")
    folder = root / found
    if not folder.exists():  # a save that replaced this tag was killed between its two renames
        folder = next((old for old in leftovers(root, ".old-", found) if (old / INDEX_NAME).is_file()), folder)
    if not (folder / INDEX_NAME).is_file():
        there = sorted(p.parent.name for p in root.glob(f"*/{INDEX_NAME}") if not p.parent.name.startswith("."))
        raise CheckpointError(f"{folder}: no checkpoint there; tags in {root}: {', '.join(there) or 'none'}")
    return Reader(folder, Index.from_json((folder / INDEX_NAME).read_text(), str(folder / INDEX_NAME)), **options)


def load(
    directory: str | os.PathLike[str],
    tag: str | None = None,
    *,
    module: nn.Module,
    optimizer: Loadable,
    ranks: Ranks | None = None,
    strict: bool = True,
    optimizer_states: bool = True,
    verify: bool = True,
) -> Loaded | None:
    """Fill `module` (buffers) and `optimizer` (parameters, masters, states) from a checkpoint, collectively.

    Returns None when `directory` has no checkpoint and no tag was asked for. With `strict`, names or shapes that do not
    fit raise `CheckpointError` before anything is changed; without, what fits is loaded and the rest reported.
    """
    ranks = ranks or default_ranks()
    root = Path(directory)
    tags = together(ranks, f"finding a checkpoint in {root}", lambda: resolve_tag(root, tag))
    if tags[0] is None:
        return None
    options = {"optimizer_states": optimizer_states, "verify": verify}
    reader = _own(ranks, f"opening {root / tags[0]}", lambda: open_checkpoint(root, tags[0], **options))
    missing, unexpected = _own(
        ranks, f"comparing names with {reader.folder}", lambda: _compare(reader, module, optimizer, strict)
    )
    state = _own(ranks, "reading the client state", lambda: decode(reader.index.state, _client_tensors(reader)))
    together(ranks, f"verifying {reader.folder}", lambda: _verify_owned(reader, optimizer) if verify else None)
    together(ranks, f"reading {reader.folder}", lambda: _fill(reader, module, optimizer))
    return Loaded(reader.folder, state, missing, unexpected)


def _own(ranks: Ranks, doing: str, action: Any) -> Any:
    """Like `together`, but each rank keeps its own result."""
    kept: list[Any] = []
    together(ranks, doing, lambda: kept.append(action()))
    return kept[0]


def _compare(
    reader: Reader, module: nn.Module, optimizer: Loadable, strict: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    shapes = {part.name: tuple(part.shape) for part in optimizer.slices()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in persistent_buffers(module)}
    stored = {n: p.spec.shape for n, p in reader.index.tensors.items() if p.file.startswith(MODEL)}
    wrong = [
        f"{n}: {stored[reader._name(n)]} in the checkpoint, {s} in the model"
        for n, s in shapes.items()
        if reader.has(n) and stored.get(reader._name(n)) != s
    ]
    if wrong:
        raise CheckpointError(f"{reader.folder}: shapes differ: {'; '.join(wrong[:10])}")
    missing = tuple(n for n in shapes if not reader.has(n) and n not in reader.index.excluded)
    known = {reader._name(n) for n in shapes}
    unexpected = tuple(n for n in stored if n not in known)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{reader.folder}: names differ: missing in the checkpoint: {list(missing[:10])}; not in the model: "
            f"{list(unexpected[:10])}; pass load_module_strict=False to load what fits"
        )
    return missing, unexpected


def _client_tensors(reader: Reader) -> dict[str, torch.Tensor]:
    return {n: reader.whole(n) for n, p in reader.index.tensors.items() if p.file.startswith(CLIENT)}


def _verify_owned(reader: Reader, optimizer: Loadable) -> None:
    """Read and hash everything this rank is about to load, before the first value is changed."""
    for part in optimizer.slices():
        if part.stop > part.start and reader.has(part.name):
            reader.master(part.name, part.start, part.stop)
            for key in reader.state_keys(part.name):
                reader.state(key, part.name, part.start, part.stop)


def _fill(reader: Reader, module: nn.Module, optimizer: Loadable) -> None:
    with torch.no_grad():
        for name, buffer in persistent_buffers(module):
            if reader.has(name):
                buffer.copy_(reader.whole(name))
        optimizer.load_slices(reader)
