"""A load: every load is a re-shard.

A rank asks for the regions it holds now. A load has two steps: `prepare_load` reads, verifies (`verify=False` skips
that) and compares everything, and all ranks agree that they have done so well; `Prepared.install` changes the model. A
checkpoint that is damaged or does not fit leaves every model as it was. Between the steps what was read lies in host
memory: as many bytes as this rank holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..utils.logging import logger
from .encode import decode
from .errors import CheckpointCorruptError, CheckpointError
from .folder import check_folder, check_one_folder, meant_as_latest, resolve_tag
from .format import DTYPES, MODEL, TensorSpec
from .ranks import Ranks, default_ranks
from .reading import Reader, open_checkpoint
from .selecting import Selection
from .snapshot import Place, persistent_buffers
from .verifying import check_files

__all__ = ["LoadDisks", "LoadRequest", "Loadable", "Loaded", "OneDisk", "Prepared", "load", "prepare_load"]


class Loadable(Protocol):
    """What `load` fills: the sharded optimizer of dsx-zero."""

    def slices(self) -> Iterable[Any]: ...

    def read_slices(self, reader: Reader) -> Any:
        """Read without changing anything; what is returned has a collective `install()`."""
        ...


@dataclass(frozen=True)
class Loaded:
    """What was read beside the tensors.

    Attributes:
        state: what `save` was given.
        rank_state: what this rank gave; None where another number of ranks saved, or nothing was given.
        missing, unexpected: names of the model that the checkpoint does not have, and the other way round.
        saved_by: how many ranks gave a `rank_state`.
    """

    path: Path
    state: dict[str, Any]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    rank_state: Any = None
    saved_by: int = 0


@dataclass(frozen=True)
class Prepared:
    """A checkpoint that was read, verified and found to fit; the model is as it was until `install`."""

    loaded: Loaded
    _buffers: list[tuple[torch.Tensor, torch.Tensor]]
    _slices: Any

    def install(self) -> Loaded:
        """Write everything into the model and the optimizer. Collective, and only once."""
        with torch.no_grad():
            while self._buffers:
                buffer, value = self._buffers.pop()
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
    places: Mapping[str, Place] | None = None,
    strict: bool = True,
    optimizer_states: bool = True,
    verify: bool = True,
    selection: Selection | None = None,
    disks: LoadDisks | None = None,
) -> Prepared | None:
    """Read and verify on every rank what `module` (buffers) and `optimizer` (parameters, masters, states) need;
    collective.

    Nothing is changed: an error on one rank is the same error on all, and leaves every model as it was.

    Args:
        ranks: all ranks that hold a part of the model; None: all there are.
        places: for tensors of which this rank holds a part, or that have another name in the whole model.
        strict: names that do not fit are an error; else what fits is loaded.
        selection: which tensors, and under which names.
        disks: how the ranks reach the folder; None: all see the same one.

    Where no tag was asked for and the latest checkpoint is damaged, the one before it is taken, and a warning says so.

    Returns:
        None when `directory` has no checkpoint and no tag was asked for.

    Raises:
        CheckpointError: there is something, but nothing that can be loaded.
    """
    ranks, disks = ranks or default_ranks(), disks or OneDisk()
    root = ranks.all_or_none("finding a checkpoint", lambda: check_folder(directory, "directory"))
    request = LoadRequest(module, optimizer, places or {}, strict, optimizer_states, verify, selection or Selection())
    disks.check_folders("load", ranks.gather(os.path.realpath(root)))
    damage: CheckpointError | None = None
    for name in disks.candidates(root, tag, ranks):
        try:
            disks.make_ready(root, name, request, ranks)
            prepared = request.prepare(root, name, ranks, checks=disks.checks(ranks), parts=disks.parts)
        except CheckpointError as error:  # the same on all ranks, so that all go on here together
            if tag is not None or (damage is None and not isinstance(error, CheckpointCorruptError)):
                raise
            if damage is not None:
                logger.warning("%s", error)
            damage = damage or error
            continue
        if damage is not None:
            logger.warning("%s\nGoing back to the checkpoint before it: %s", damage, prepared.loaded.path)
        return prepared
    if damage is not None:
        raise damage
    return None


class LoadDisks(Protocol):
    """How the ranks reach the folder: one that all see (`OneDisk`), or one on each node (`nodes.disks.NodeDisks`).

    Attributes:
        parts: whether a folder may hold a part of a checkpoint's bytes.
    """

    parts: bool

    def check_folders(self, call: str, paths: Sequence[str]) -> None:
        """Raise `CheckpointArgumentError` unless ranks that see the same disk name the same folder."""
        ...

    def candidates(self, root: Path, tag: str | None, ranks: Ranks) -> Iterable[str]:
        """The tags to try, the same on all ranks: the one that is asked for, or the latest, then older ones.
        Collective, also when the next one is asked for.
        """
        ...

    def make_ready(self, root: Path, name: str, request: LoadRequest, ranks: Ranks) -> None:
        """Bring what this rank needs of a checkpoint where it can read it. Collective."""
        ...

    def checks(self, ranks: Ranks) -> bool:
        """Whether this rank compares sizes and headers of files for those that see the same."""
        ...


class OneDisk:
    """All ranks see one folder."""

    parts = False

    def check_folders(self, call: str, paths: Sequence[str]) -> None:
        """See `LoadDisks`."""
        check_one_folder(call, paths)

    def candidates(self, root: Path, tag: str | None, ranks: Ranks) -> Iterable[str]:
        """See `LoadDisks`."""
        name = ranks.together("finding a checkpoint", lambda: resolve_tag(root, tag))[0]
        if name is None:
            return
        yield name
        if tag is None:
            yield from ranks.together("looking for an older checkpoint", lambda: _older(root, name))[0]

    def make_ready(self, root: Path, name: str, request: LoadRequest, ranks: Ranks) -> None:
        """Nothing: all ranks see everything."""

    def checks(self, ranks: Ranks) -> bool:
        """See `LoadDisks`."""
        return ranks.rank == 0


def _older(root: Path, name: str) -> list[str]:
    """Checkpoints that may take the place of a damaged one, the youngest first."""
    return [tag for tag in meant_as_latest(root) if tag != name]


@dataclass(frozen=True)
class LoadRequest:
    """What a load is to fill, and how; the arguments of `prepare_load`."""

    module: nn.Module
    optimizer: Loadable
    places: Mapping[str, Place]
    strict: bool
    optimizer_states: bool
    verify: bool
    selection: Selection

    @property
    def options(self) -> dict[str, Any]:
        """What a `Reader` is to know."""
        return {
            "optimizer_states": self.optimizer_states, "verify": self.verify, "places": self.places,
            "selection": self.selection,
        }  # fmt: skip

    def compare(self, reader: Reader) -> tuple[tuple[str, ...], frozenset[str]]:
        """Names that this rank misses in the checkpoint, and names in it that this rank does not have.

        Raises:
            CheckpointError: tensors have another shape, or are numbers of another kind.
        """
        return _compare(reader, _wanted(self.module, self.optimizer, self.places))

    def read(self, reader: Reader, ranks: Ranks) -> tuple[Any, Any, list[tuple[torch.Tensor, torch.Tensor]], Any]:
        """State, the rank's own state, buffers with their new values, and what `optimizer.read_slices` returns."""
        index = reader.index
        mine = index.ranks[ranks.rank] if len(index.ranks) == ranks.world_size else None
        state, rank_state = decode(index.state, reader.client), decode(mine, reader.client)
        buffers = [
            (b, reader.buffer(n, tuple(b.shape)))
            for n, b in persistent_buffers(self.module)
            if self.selection.wants(n) and reader.has(n)
        ]
        return state, rank_state, buffers, self.optimizer.read_slices(reader)

    def prepare(self, root: Path, name: str, ranks: Ranks, *, checks: bool, parts: bool) -> Prepared:
        """Read one checkpoint. Collective, with the same error on all ranks.

        Args:
            checks: this rank compares sizes and headers of the files.
            parts: the folder may hold one node's part of the bytes, with all that this rank needs.
        """
        reader: Any = None

        def compare() -> tuple[tuple[str, ...], frozenset[str]]:
            nonlocal reader
            reader = open_checkpoint(root, name, parts=parts, **self.options)
            if self.verify and checks:
                check_files(reader.folder, reader.index)
            return self.compare(reader)

        missing, unexpected = _merge(root / name, ranks.together(f"opening {root / name}", compare), self.strict)
        reader.verifies_later = True
        state, rank_state, buffers, slices = ranks.all_or_none(
            f"reading {root / name}", lambda: self.read(reader, ranks)
        )
        if reader.verification is not None:
            reader.verification.settle(ranks)
        saved_by = len(reader.index.ranks)
        return Prepared(Loaded(reader.folder, state, missing, unexpected, rank_state, saved_by), buffers, slices)


def load(directory: str | os.PathLike[str], tag: str | None = None, **options: Any) -> Loaded | None:
    """Fill a module and an optimizer from a checkpoint, collectively; see `prepare_load` for arguments and errors."""
    prepared = prepare_load(directory, tag, **options)
    return None if prepared is None else prepared.install()


# - Does it fit?


def _wanted(
    module: nn.Module, optimizer: Loadable, places: Mapping[str, Place]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name here -> shape of the whole tensor and dtype here, of every parameter and buffer."""
    found = {part.name: (tuple(part.shape), part.param.dtype) for part in optimizer.slices()}
    found |= {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in persistent_buffers(module)}
    return {name: (Place.of(name, shape, places).shape, dtype) for name, (shape, dtype) in found.items()}


def _compare(
    reader: Reader, wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names that this rank misses in the checkpoint, and names in it that this rank does not have."""
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
        raise CheckpointError(f"{reader.folder}: tensors do not fit: {'; '.join(wrong[:10])}")
    stored = {name: reader.name_of(name) for name in wanted}
    missing = tuple(
        n for n in wanted if reader.selection.wants(n) and not reader.has(n) and stored[n] not in reader.index.excluded
    )
    whole = reader.selection.weights and reader.selection.only is None  # else leaving something out is the purpose
    return missing, frozenset(reader.index.tensors[MODEL]) - set(stored.values()) if whole else frozenset()


def _differs_in_rows(reader: Reader, name: str, stored: tuple[int, ...], here: tuple[int, ...]) -> bool:
    """Is this a tensor that may have other rows, and differs in nothing else?"""
    return reader.selection.may_pad(name) and len(stored) == len(here) > 0 and stored[1:] == here[1:]


def _merge(
    folder: Path, ranks: list[tuple[tuple[str, ...], frozenset[str]]], strict: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What any rank misses, and what no rank has. Raises `CheckpointError` if that is something and `strict`."""
    missing = tuple(dict.fromkeys(name for names, _ in ranks for name in names))
    unexpected = tuple(sorted(frozenset.intersection(*(names for _, names in ranks))))
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{folder}: names differ: missing in the checkpoint: {list(missing[:10])}; not in the model: "
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
