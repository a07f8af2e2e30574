"""Reading a checkpoint: every load is a re-shard.

A rank asks for the regions it holds now; who wrote them, and in which stage or world size, does not matter. A load has
two steps: `prepare_load` reads, verifies (`verify=False` skips that) and compares everything, and all ranks agree that
they have done so well; `Prepared.install` changes the model. A checkpoint that is damaged or does not fit leaves every
model as it was. Between the steps
what was read lies in host memory: as many bytes as this rank holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..utils.logging import logger
from .boxes import Box, Region
from .crc import Sums
from .encode import decode
from .errors import CheckpointCorruptError, CheckpointError, shown
from .files import opened, read_text
from .folder import check_folder, check_one_folder, find_checkpoint, meant_as_latest, resolve_tag
from .format import CLIENT, DTYPES, INDEX_NAME, LATEST_NAME, MASTER, MODEL, OPTIMIZER, Index, TensorSpec
from .parsing import parse_index
from .ranks import Ranks, default_ranks
from .regions import read_region
from .selecting import Selection
from .snapshot import Place, persistent_buffers
from .verifying import Verification, check_files


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


class Reader:
    """Regions of tensors of one checkpoint, by the parameter's name (or a tied name of it) in this rank's model.

    Answers None where the checkpoint has nothing, which means: keep what you have. Ranges count the elements of this
    rank's tensor, row by row; `places` says of which tensors that is a part of the whole one.

    What is read is verified: alone, whole chunks are read where a range begins or ends inside one; in a load of several
    ranks `verification` waits for all of them.
    """

    def __init__(
        self,
        folder: Path,
        index: Index,
        *,
        optimizer_states: bool = True,
        verify: bool = True,
        places: Mapping[str, Place] | None = None,
        selection: Selection | None = None,
    ) -> None:
        self.folder, self.index = folder, index
        self.selection = selection or Selection()
        self.verification = Verification(folder, index) if verify else None
        self.verifies_later = False
        self._optimizer_states, self._places = optimizer_states, places or {}
        self._canonical = {alias: name for name, others in index.aliases.items() for alias in others}
        self._renamed = self.selection.renamed([*index.tensors[MODEL], *self._canonical])
        self.unfit: set[str] = set()
        """Tensors of the model whose shape is another one here, and whose states are therefore not loaded."""
        self._hidden = set(self._renamed.values()) - set(self._renamed)  # what has another name now
        self._keys: dict[str, list[str]] = {}  # parameter -> its states, so that asking for all of them is linear
        for key, _, name in (n.partition("/") for n in index.tensors[OPTIMIZER]):
            if key != MASTER:
                self._keys.setdefault(name, []).append(key)
        for key, values in index.scalars.items():
            for name in values:
                self._keys.setdefault(name, []).append(key)

    def name_of(self, name: str) -> str:
        """The name under which a parameter or buffer is stored, given any of its names."""
        if name in self._places:
            name = self._places[name].name
        if name in self._hidden:
            return ""  # no tensor has this name
        name = self._renamed.get(name, name)
        return name if name in self.index.aliases else self._canonical.get(name, name)

    def spec_of(self, name: str) -> TensorSpec | None:
        """The stored parameter or buffer of this name; None if there is none."""
        entry = self.index.tensors[MODEL].get(self.name_of(name))
        return None if entry is None else entry.spec

    def has(self, name: str) -> bool:
        """Is there a parameter or buffer of this name?"""
        return self.spec_of(name) is not None

    def param(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """Elements of the stored parameter, 1-D, in the stored dtype."""
        if not self.selection.wants(name):
            return None
        return self._read(MODEL, self.name_of(name), name, start, stop)

    def master(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """Elements of the fp32 master; the parameter itself where it was stored in full precision."""
        if not self.selection.wants(name):
            return None
        found = self._read(OPTIMIZER, f"{MASTER}/{self.name_of(name)}", name, start, stop)
        return self.param(name, start, stop) if found is None else found

    def state_keys(self, name: str) -> tuple[str, ...]:
        """The optimizer states stored for a parameter; empty when they are not to be loaded."""
        if not self._loads_states_of(name):
            return ()
        return tuple(self._keys.get(self.name_of(name), ()))

    def state(self, key: str, name: str, start: int, stop: int) -> torch.Tensor | int | float | None:
        """A range of an optimizer state, or the number it is."""
        if not self._loads_states_of(name):
            return None
        scalar = self.index.scalars.get(key, {}).get(self.name_of(name))
        return scalar if scalar is not None else self._read(OPTIMIZER, f"{key}/{self.name_of(name)}", name, start, stop)

    def _loads_states_of(self, name: str) -> bool:
        return self._optimizer_states and self.selection.selects(name) and name not in self.unfit

    def whole(self, name: str) -> torch.Tensor:
        """A whole parameter or buffer in its logical shape, whatever part of it this rank holds."""
        stored = self.name_of(name)
        entry = self.index.tensors[MODEL].get(stored)
        if entry is None:
            raise CheckpointError(f"{self.folder}: has no tensor {shown(name)}")
        return self._read_region((MODEL, stored), Region.whole(entry.spec.shape)).reshape(entry.spec.shape)

    def stored(self, family: str, name: str) -> torch.Tensor:
        """A whole tensor as it is stored, by family ("model", "optimizer", "client") and name in the family's files."""
        shape = self.index.tensors[family][name].spec.shape
        return self._read_region((family, name), Region.whole(shape)).reshape(shape)

    def state_of_caller(self) -> dict[str, Any]:
        """What `save` was given as `state`: under "engine" the training state, under "client" the caller's."""
        return decode(self.index.state, self.client)

    def buffer(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """This rank's part of a stored buffer, in the shape it has here."""
        values = self.param(name, 0, torch.Size(shape).numel())
        if values is None:
            raise CheckpointError(f"{self.folder}: has no buffer {shown(name)}")
        return values.reshape(shape)

    def client(self, name: str) -> torch.Tensor:
        """A tensor of the client state. Raises `CheckpointCorruptError` where there is none of this name."""
        entry = self.index.tensors[CLIENT].get(name)
        if entry is None:
            raise CheckpointCorruptError(f"{self.folder}: the state names a tensor {shown(name)} that is not there")
        return self._read_region((CLIENT, name), Region.whole(entry.spec.shape)).reshape(entry.spec.shape)

    def _read(self, family: str, stored: str, name: str, start: int, stop: int) -> torch.Tensor | None:
        entry = self.index.tensors[family].get(stored)
        if entry is None:
            return None
        place = self._places.get(name)
        region = Region.whole(entry.spec.shape) if place is None else Region(place.box, 0, place.box.numel)
        region = Region(region.box, start, stop)
        if self.selection.may_pad(name):
            return self._read_padded((family, stored), region, place)
        if not region.lies_in(entry.spec.shape):
            raise CheckpointError(
                f"{shown(name)}: elements {start} to {stop} of a tensor of shape {region.box.size} were asked for, but "
                f"the checkpoint's tensor has shape {entry.spec.shape}"
            )
        return self._read_region((family, stored), region)

    def _read_padded(self, key: tuple[str, str], region: Region, place: Place | None) -> torch.Tensor:
        """A region of a tensor that may have other rows than the stored one: zeros for rows that are not stored."""
        shape = self.index.tensors[key[0]][key[1]].spec.shape
        box = region.box if place is not None else Box.whole(shape)
        rows = max(0, min(box.size[0], shape[0] - box.offset[0]))
        there = Box(box.offset if rows else (0, *box.offset[1:]), (rows, *box.size[1:]))
        start, stop = min(region.start, there.numel), min(region.stop, there.numel)
        values = self._read_region(key, Region(there, start, stop))
        return torch.cat([values, values.new_zeros(region.numel - values.numel())])

    def _read_region(self, key: tuple[str, str], region: Region) -> torch.Tensor:
        entry = self.index.tensors[key[0]][key[1]]
        sums = Sums(entry.chunks)
        with opened(self.folder / entry.placed.file, os.O_RDONLY) as fd:
            values = read_region(fd, entry.placed, region, sums)
        if self.verification is not None:
            self.verification.add(key, region, sums)
            if not self.verifies_later:
                self.verification.settle_alone()
        return values


def open_checkpoint(
    directory: str | os.PathLike[str],
    tag: str | None = None,
    *,
    optimizer_states: bool = True,
    verify: bool = True,
    places: Mapping[str, Place] | None = None,
    selection: Selection | None = None,
) -> Reader:
    """A `Reader` of a committed checkpoint, in this process alone.

    Args:
        tag: which one; None: the one that `latest` names.
        optimizer_states: whether `state_keys` and `state` have answers.
        verify: whether what is read is compared with the hashes.
        places: where this process holds parts of tensors; see `Place`.
        selection: which tensors, and under which names.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    root = check_folder(directory, "directory")
    found = resolve_tag(root, tag)
    if found is None:
        raise CheckpointError(f"{root}: no '{LATEST_NAME}' file; expected a folder that save_checkpoint has written")
    folder = find_checkpoint(root, found)
    index = parse_index(read_text(folder / INDEX_NAME), str(folder / INDEX_NAME))
    return Reader(folder, index, optimizer_states=optimizer_states, verify=verify, places=places, selection=selection)


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
) -> Prepared | None:
    """Read and verify on every rank what `module` (buffers) and `optimizer` (parameters, masters, states) need;
    collective.

    Nothing is changed: an error on one rank is the same error on all, and leaves every model as it was.

    Args:
        ranks: all ranks that hold a part of the model; None: all there are.
        places: for tensors of which this rank holds a part, or that have another name in the whole model.
        strict: names that do not fit are an error; else what fits is loaded.
        selection: which tensors, and under which names.

    Where no tag was asked for and the latest checkpoint is damaged, the one before it is taken, and a warning says so.

    Returns:
        None when `directory` has no checkpoint and no tag was asked for.

    Raises:
        CheckpointError: there is something, but nothing that can be loaded.
    """
    ranks = ranks or default_ranks()

    def resolve() -> tuple[str, str | None]:
        root = check_folder(directory, "directory")
        return os.path.realpath(root), resolve_tag(root, tag)

    def prepare(name: str) -> Prepared:
        request = _Request(module, optimizer, places or {}, strict, optimizer_states, verify, selection or Selection())
        return request.prepare(Path(directory), name, ranks)

    found = ranks.together("finding a checkpoint", resolve)
    check_one_folder("load", [path for path, _ in found])
    name = found[0][1]
    if name is None:
        return None
    try:
        return prepare(name)
    except CheckpointCorruptError as error:  # the same on all ranks, so that all go on here together
        if tag is not None:
            raise
        damage = error
    older = ranks.together("looking for an older checkpoint", lambda: _older(Path(directory), name))[0]
    for other in older:
        try:
            prepared = prepare(other)
        except CheckpointError as error:
            logger.warning("%s", error)
            continue
        logger.warning("%s\nGoing back to the checkpoint before it: %s", damage, prepared.loaded.path)
        return prepared
    raise damage


def _older(root: Path, name: str) -> list[str]:
    """Checkpoints that may take the place of a damaged one, the youngest first."""
    return [tag for tag in meant_as_latest(root) if tag != name]


@dataclass(frozen=True)
class _Request:
    """What a load is to fill, and how; the arguments of `prepare_load`."""

    module: nn.Module
    optimizer: Loadable
    places: Mapping[str, Place]
    strict: bool
    optimizer_states: bool
    verify: bool
    selection: Selection

    def prepare(self, root: Path, name: str, ranks: Ranks) -> Prepared:
        """Read one checkpoint. Collective, with the same error on all ranks."""
        reader: Any = None

        def compare() -> tuple[tuple[str, ...], frozenset[str]]:
            nonlocal reader
            reader = open_checkpoint(
                root,
                name,
                optimizer_states=self.optimizer_states,
                verify=self.verify,
                places=self.places,
                selection=self.selection,
            )
            if self.verify and ranks.rank == 0:
                check_files(reader.folder, reader.index)
            return _compare(reader, _wanted(self.module, self.optimizer, self.places))

        def read() -> tuple[Any, Any, list[tuple[torch.Tensor, torch.Tensor]], Any]:
            index = reader.index
            mine = index.ranks[ranks.rank] if len(index.ranks) == ranks.world_size else None
            state, rank_state = decode(index.state, reader.client), decode(mine, reader.client)
            buffers = [
                (b, reader.buffer(n, tuple(b.shape)))
                for n, b in persistent_buffers(self.module)
                if self.selection.wants(n) and reader.has(n)
            ]
            return state, rank_state, buffers, self.optimizer.read_slices(reader)

        missing, unexpected = _merge(root / name, ranks.together(f"opening {root / name}", compare), self.strict)
        reader.verifies_later = True
        state, rank_state, buffers, slices = ranks.all_or_none(f"reading {root / name}", read)
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
