"""Loads a checkpoint. Every load shards the tensors again.

Each rank asks for the regions that it holds now. A load has two steps. `prepare_load` reads, verifies (unless
`verify=False`) and compares everything, and all ranks agree that this succeeded. `Prepared.install` changes the model.
If a checkpoint is damaged or does not fit, every model stays unchanged. Between the steps the values are in host
memory: as many bytes as this rank holds.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from dsx_core import with_code
from torch import nn

from .encode import decode
from .errors import CheckpointCorruptError, CheckpointError
from .extra_state import EXTRA_KEY, modules_with_extra_state
from .fitting import MOST_SHOWN, Differences, compare, merge, wanted
from .folder import check_folder, check_one_folder, meant_as_latest, resolve_tag
from .format import MODEL
from .ranks import Ranks, default_ranks
from .reading import Reader, open_checkpoint
from .selecting import Selection
from .snapshot import Place, persistent_buffers
from .verifying import check_files

logger = logging.getLogger("dsx.checkpoint")

__all__ = ["LoadDisks", "LoadRequest", "Loadable", "Loaded", "OneDisk", "Prepared", "load", "prepare_load"]


class Loadable(Protocol):
    """The object that `load` fills: the sharded optimizer of dsx-zero."""

    def slices(self) -> Iterable[Any]: ...

    def read_slices(self, reader: Reader) -> Any:
        """Read without changing anything; the result has a collective method `install()`."""
        ...


@dataclass(frozen=True)
class Loaded:
    """The result of a load, except the tensors.

    Attributes:
        state: the `state` that `save` was given.
        rank_state: the `rank_state` of this rank; None if another number of ranks saved, or none was given.
        missing, unexpected: names of the model that the checkpoint does not have, and names that only it has.
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
    """A checkpoint that was read and verified, and that fits. The model is unchanged until `install`."""

    loaded: Loaded
    _buffers: list[tuple[torch.Tensor, torch.Tensor]]
    _slices: Any
    _extra: list[tuple[nn.Module, Any]]

    def install(self) -> Loaded:
        """Write everything into the model and the optimizer. Collective. Can be called once."""
        with torch.no_grad():
            while self._buffers:
                buffer, value = self._buffers.pop()
                buffer.copy_(value)
        for child, value in self._extra:
            child.set_extra_state(value)
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
    """Read and verify on every rank the data for `module` (buffers) and `optimizer` (parameters, masters, states).
    Collective.

    Nothing is changed. An error on one rank is raised on all ranks, and every model stays unchanged.

    Args:
        ranks: all ranks that hold a part of the model; None: all ranks.
        places: the places of tensors of which this rank holds a part, or that have another name in the whole model.
        strict: names that do not fit are an error; False: names that fit are loaded.
        selection: which tensors to load, and under which names.
        disks: the disks of the nodes; None: all ranks see the same folder.

    If no tag was given and the latest checkpoint is damaged, the previous one is loaded, with a warning. If another job
    has removed it meanwhile, the load begins once more with the one that is the latest now.

    Returns:
        None if `directory` has no checkpoint and no tag was given.

    Raises:
        CheckpointError: the folder is not empty, but has no checkpoint that can be loaded.
    """
    ranks, disks = ranks or default_ranks(), disks or OneDisk()
    root = ranks.keep("finding a checkpoint", lambda: check_folder(directory, "directory"))
    request = LoadRequest(module, optimizer, places or {}, strict, optimizer_states, verify, selection or Selection())
    disks.check_folders("load", ranks.gather(os.path.realpath(root)))
    tried: list[str] = []
    try:
        return _first_that_loads(root, tag, request, disks, ranks, tried)
    except CheckpointError:  # the same on all ranks
        # Another job may have saved a new checkpoint and removed this one meanwhile.
        if tag is not None or next(iter(disks.candidates(root, tag, ranks)), None) in (None, *tried):
            raise
        return _first_that_loads(root, tag, request, disks, ranks, tried)


def _first_that_loads(
    root: Path, tag: str | None, request: LoadRequest, disks: LoadDisks, ranks: Ranks, tried: list[str]
) -> Prepared | None:
    """Read the checkpoint that is asked for, or the latest one that is not damaged. `tried` gets the tags."""
    damage: CheckpointError | None = None
    for name in disks.candidates(root, tag, ranks):
        tried.append(name)
        try:
            prepared = _mended(root, name, request, disks, ranks)
        except CheckpointError as error:  # the same on all ranks, so that all go on here together
            if tag is not None or (damage is None and not isinstance(error, CheckpointCorruptError)):
                raise
            if damage is not None:
                logger.warning("%s", error)
            damage = damage or error
            continue
        if damage is not None:
            text = with_code("%s\nGoing back to the checkpoint before it: %s", "DSX556")
            logger.warning(text, damage, prepared.loaded.path)
        return prepared
    if damage is not None:
        raise damage
    return None


def _mended(root: Path, name: str, request: LoadRequest, disks: LoadDisks, ranks: Ranks) -> Prepared:
    """Read one checkpoint; where it is damaged and there are copies, once more after these have mended it."""

    def read() -> Prepared:
        disks.make_ready(root, name, request, ranks)
        return request.prepare(root, name, ranks, checks=disks.checks(ranks), parts=disks.parts)

    try:
        return read()
    except CheckpointCorruptError as error:  # the same on all ranks, so that all look for copies together
        if not disks.mend(root, name, ranks):
            raise
        logger.warning("%s\nIt was mended from copies, and is read again", error)
        return read()


class LoadDisks(Protocol):
    """The disks of the ranks: one folder that all see (`OneDisk`), or one on each node (`nodes.disks.NodeDisks`).

    Attributes:
        parts: whether a folder may hold a part of a checkpoint's bytes.
    """

    parts: bool

    def check_folders(self, call: str, paths: Sequence[str]) -> None:
        """Raise `CheckpointArgumentError` unless ranks that see the same disk name the same folder."""
        ...

    def candidates(self, root: Path, tag: str | None, ranks: Ranks) -> Iterable[str]:
        """The tags to try, the same on all ranks: the given one, or the latest and then older ones. Collective; so is
        each step of the iteration.
        """
        ...

    def make_ready(self, root: Path, name: str, request: LoadRequest, ranks: Ranks) -> None:
        """Make the parts of a checkpoint that this rank needs readable for it. Collective."""
        ...

    def mend(self, root: Path, name: str, ranks: Ranks) -> bool:
        """A checkpoint was found to be damaged: write it again from copies. Collective; False where nothing was
        mended.
        """
        ...

    def checks(self, ranks: Ranks) -> bool:
        """Whether this rank compares sizes and headers of files, on behalf of all ranks that see the same folder."""
        ...


class OneDisk:
    """All ranks see one folder."""

    parts = False

    def check_folders(self, call: str, paths: Sequence[str]) -> None:
        """See `LoadDisks`."""
        check_one_folder(call, paths)

    def candidates(self, root: Path, tag: str | None, ranks: Ranks) -> Iterable[str]:
        """See `LoadDisks`."""
        name = ranks.run("finding a checkpoint", lambda: resolve_tag(root, tag))[0]
        if name is None:
            return
        yield name
        if tag is None:
            yield from ranks.run("looking for an older checkpoint", lambda: _older(root, name))[0]

    def make_ready(self, root: Path, name: str, request: LoadRequest, ranks: Ranks) -> None:
        """Does nothing: all ranks see all files."""

    def mend(self, root: Path, name: str, ranks: Ranks) -> bool:
        """See `LoadDisks`; there are no copies."""
        return False

    def checks(self, ranks: Ranks) -> bool:
        """See `LoadDisks`."""
        return ranks.rank == 0


def _older(root: Path, name: str) -> list[str]:
    """Checkpoints that may be loaded instead of a damaged one, the youngest first."""
    return [tag for tag in meant_as_latest(root) if tag != name]


@dataclass(frozen=True)
class LoadRequest:
    """The arguments of `prepare_load`: the objects to fill, and the options."""

    module: nn.Module
    optimizer: Loadable
    places: Mapping[str, Place]
    strict: bool
    optimizer_states: bool
    verify: bool
    selection: Selection

    @property
    def options(self) -> dict[str, Any]:
        """The options for a `Reader`."""
        return {
            "optimizer_states": self.optimizer_states, "verify": self.verify, "places": self.places,
            "selection": self.selection,
        }  # fmt: skip

    def compare(self, reader: Reader) -> Differences:
        """Names that this rank misses in the checkpoint, and names in it that this rank has.

        Raises:
            CheckpointError: tensors have another shape, or are numbers of another kind.
        """
        found = compare(reader, wanted(self.module, self.optimizer.slices(), self.places))
        return dataclasses.replace(found, missing=found.missing[:MOST_SHOWN]) if self.strict else found

    def read(self, reader: Reader, ranks: Ranks) -> tuple[Any, Any, dict[str, list[Any]], Any]:
        """State, the rank's own state, buffers and modules with their new values, and what `optimizer.read_slices`
        returns.
        """
        index = reader.index
        mine = index.ranks[ranks.rank] if len(index.ranks) == ranks.world_size else None
        state, rank_state = decode(index.state, reader.client), decode(mine, reader.client)
        saved = state.pop(EXTRA_KEY, {}) if isinstance(state, dict) else {}
        extra = [
            (child, saved[n])
            for n, child in modules_with_extra_state(self.module)
            if self.selection.wants(n) and n in saved
        ]
        buffers = [
            (b, reader.buffer(n, tuple(b.shape)))
            for n, b in persistent_buffers(self.module)
            if self.selection.wants(n) and reader.has(n)
        ]
        return state, rank_state, {"_buffers": buffers, "_extra": extra}, self.optimizer.read_slices(reader)

    def prepare(self, root: Path, name: str, ranks: Ranks, *, checks: bool, parts: bool) -> Prepared:
        """Read one checkpoint. Collective, with the same error on all ranks.

        Args:
            checks: this rank compares sizes and headers of the files.
            parts: the folder may have only one node's part of the bytes, which contains all that this rank needs.
        """
        reader: Any = None

        def found() -> Differences:
            nonlocal reader
            reader = open_checkpoint(root, name, parts=parts, **self.options)
            if self.verify and checks:
                check_files(reader.folder, reader.index)
            return self.compare(reader)

        def merged(everyone: list[Differences]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
            names = list(reader.index.tensors[MODEL])
            return [merge(root / name, everyone, names, self.strict)] * len(everyone)

        missing, unexpected = ranks.through_first(f"opening {root / name}", found, merged)
        reader.verifies_later = True
        state, rank_state, of_module, slices = ranks.keep(f"reading {root / name}", lambda: self.read(reader, ranks))
        if reader.verification is not None:
            reader.verification.settle(ranks)
        saved_by = len(reader.index.ranks)
        loaded = Loaded(reader.folder, state, missing, unexpected, rank_state, saved_by)
        return Prepared(loaded, _slices=slices, **of_module)


def load(directory: str | os.PathLike[str], tag: str | None = None, **options: Any) -> Loaded | None:
    """Fill a module and an optimizer from a checkpoint, collectively; see `prepare_load` for arguments and errors."""
    prepared = prepare_load(directory, tag, **options)
    return None if prepared is None else prepared.install()
