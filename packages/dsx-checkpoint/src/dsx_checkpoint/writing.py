"""Writes a checkpoint in four phases, each of which is an object or a function:

    1) snapshot   every rank lists what it holds (`snapshot.py`)
    2) plan       the lists of all ranks become files, offsets, and which rank writes what (`plan.py`)
    3) write      rank 0 makes a temporary folder with the files at full size, or with links to files that have not
                  changed (`linking.py`); every rank writes and hashes its pieces, and flushes
    4) commit     rank 0 writes the index and renames the folder: from then on the checkpoint exists; then `latest` is
                  replaced, and old checkpoints are removed (`keeping.py`)

All ranks do every step, and a failure on one rank is raised on all. Until the rename, existing checkpoints are not
changed. A process that is killed before leaves a `.tmp-` folder, which the next save removes (`folder.py`).

Phases 1 and 2 make a `PlannedSave`. `behind.py` runs phases 3 and 4 on a separate thread, with copies of the pieces.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from ._version import __version__
from .boxes import Region
from .crc import Sums, crc_of
from .direct import FileWriter, writing
from .errors import CheckpointCorruptError, CheckpointError, shown
from .files import create, replace_text
from .folder import (
    check_folder,
    check_one_folder,
    check_tag,
    check_target,
    publish,
    remove_replaced,
    saving,
    temporary_name,
)
from .format import CHUNK_BYTES, FAMILIES, INDEX_NAME, WEIGHT_MAP_NAME, Entry, FileEntry, Index
from .keeping import Keeping
from .linking import Candidates, Known, find_candidates, hash_pieces, intact_files, link, unchanged_files
from .parsing import parse_index
from .plan import MAX_FILE_BYTES, Announcement, PieceKey, WritePlan
from .ranks import Ranks, default_ranks
from .regions import hash_region, write_region
from .snapshot import Piece, Place, Snapshot


class Disks(Protocol):
    """The disks of the ranks: one folder that all see (`SharedDisk`), or one on each node (`nodes.disks.NodeDisks`)."""

    def check_folders(self, call: str, paths: Sequence[str]) -> None:
        """Raise `CheckpointArgumentError` unless ranks that see the same disk name the same folder."""
        ...

    def planned(self, planned: PlannedSave, announcements: Sequence[Announcement], ranks: Ranks) -> PlannedSave:
        """The plan that is carried out on these disks. Collective."""
        ...


class SharedDisk:
    """All ranks see one folder."""

    def check_folders(self, call: str, paths: Sequence[str]) -> None:
        """See `Disks`."""
        check_one_folder(call, paths)

    def planned(self, planned: PlannedSave, announcements: Sequence[Announcement], ranks: Ranks) -> PlannedSave:
        """See `Disks`."""
        return planned


Written = dict[tuple[str, str], list[tuple[Region, dict[int, int]]]]
"""(family, name) -> the regions of one rank, with the registers of their chunks (see `crc.py`)."""


@dataclass(frozen=True)
class PlannedSave:
    """A planned save. The rest can be done at once, or later on a separate thread.

    Attributes:
        plan: files, places, writers; the same on all ranks.
        pieces: the pieces of this rank: views of the model's tensors, or copies of them (`copied`).
        state: the encoded state.
        temporary, target: the folder that is written, and its final name.
        latest: whether `latest` will name it.
        keeping: which older checkpoints are removed afterwards.
    """

    plan: WritePlan
    pieces: list[Piece]
    state: Any
    temporary: Path
    target: Path
    latest: bool
    keeping: Keeping

    def copied(self, pieces: list[Piece]) -> PlannedSave:
        """The same save with copies of the pieces."""
        return dataclasses.replace(self, pieces=pieces)

    def run(self, ranks: Ranks) -> Path:
        """Do phases 3 and 4. Collective. Raises `CheckpointError`, the same on all ranks; then no files are left."""
        temporary, target, plan = self.temporary, self.target, self.plan
        with ExitStack() as lock:  # held by rank 0
            try:
                only_zero = Rank0(lock, plan, temporary, target, self.latest, self.keeping) if ranks.rank == 0 else None
                candidates = ranks.together(f"making {temporary}", only_zero.prepare if only_zero else dict)[0]
                known = self._link(ranks, only_zero, candidates) if candidates else {}
                written = ranks.together(
                    f"writing {target}",
                    lambda: write_pieces(plan, self.pieces, plan.writes(ranks.rank), temporary, known),
                )
                commit = (lambda: only_zero.commit(written, self.state)) if only_zero else _nothing
                ranks.all_or_none(f"committing {target}", commit)
            except BaseException:
                if ranks.rank == 0:
                    shutil.rmtree(temporary, ignore_errors=True)
                raise
            # Together: a rank that goes on before would still see what is removed, and a folder that is locked.
            clean_up = only_zero.clean_up if only_zero else _nothing
            ranks.all_or_none(f"removing what {target} replaces", clean_up)
        return target

    def _link(self, ranks: Ranks, only_zero: Rank0 | None, candidates: Candidates) -> Known:
        """Link files that have not changed. Returns the registers of this rank's pieces in them. Collective."""
        plan, doing = self.plan, f"comparing with the checkpoint before {self.target}"
        everyone = ranks.together(doing, lambda: hash_pieces(plan, self.pieces, candidates))
        unchanged = unchanged_files(plan, candidates, everyone)
        mine = unchanged[ranks.rank :: ranks.world_size]
        intact = [
            name for names in ranks.together(doing, lambda: intact_files(plan, candidates, mine)) for name in names
        ]
        make = (lambda: only_zero.link_or_make(candidates, intact)) if only_zero else list
        linked = ranks.together(f"making {self.temporary}", make)[0]
        known = everyone[ranks.rank]
        return {key: registers for key, registers in known.items() if plan.placed[key[0]][key[1]].file in linked}


def plan_save(
    directory: str | os.PathLike[str],
    tag: str,
    *,
    module: nn.Module,
    slices: Iterable[Any],
    state: dict[str, Any],
    rank_state: dict[str, Any] | None = None,
    ranks: Ranks | None = None,
    places: Mapping[str, Place] | None = None,
    exclude_frozen: bool = False,
    save_latest: bool = True,
    keeping: Keeping | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
    disks: Disks | None = None,
) -> PlannedSave:
    """Do phases 1 and 2 of `save`, which has the same arguments and errors. Collective; nothing is written."""
    ranks, disks = ranks or default_ranks(), disks or SharedDisk()

    def take() -> tuple[Path, Snapshot]:
        target = check_folder(directory, "directory") / check_tag(tag)
        check_target(target, latest=save_latest)
        return target, Snapshot.take(
            module,
            slices,
            state,
            rank=ranks.rank,
            places=places or {},
            exclude_frozen=exclude_frozen,
            rank_state=rank_state,
        )

    target, snapshot = ranks.all_or_none("listing what to save", take)
    everyone: list[tuple[Announcement, str, str]] = ranks.gather(
        (snapshot.announcement, uuid.uuid4().hex[:12], os.path.realpath(target))
    )
    disks.check_folders("save", [path for *_, path in everyone])
    announcements = [a for a, *_ in everyone]
    plan = WritePlan.make(announcements, max_file_bytes=max_file_bytes, chunk_bytes=chunk_bytes)
    temporary = target.with_name(temporary_name(target.name, everyone[0][1]))
    planned = PlannedSave(plan, snapshot.pieces, snapshot.state, temporary, target, save_latest, keeping or Keeping())
    return disks.planned(planned, announcements, ranks)


def save(directory: str | os.PathLike[str], tag: str, *, ranks: Ranks | None = None, **options: Any) -> Path:
    """Write `<directory>/<tag>/` collectively; returns its path.

    Args:
        module: the module whose persistent buffers are saved; of replicas, those of the lowest rank.
        slices: the slices of this rank (`dsx_zero.ParamSlice`: name, aliases, shape, start, stop, trainable, param,
            master, states, ranges). Over all ranks they must cover every parameter; elements that several ranks hold
            must be equal.
        state: values that `encode.py` accepts. Rank 0's state is saved.
        rank_state: the same kinds of values, saved for each rank; a rank gets its own back if as many ranks load.
        ranks: all ranks that hold a part of the model; None: all ranks.
        places: the places of tensors of which this rank holds a part, or that have another name in the whole model.
        exclude_frozen: leave out parameters that are not trained.
        save_latest: write the tag into `latest`.
        keeping: which older checkpoints are removed after the save; None: none.
        max_file_bytes, chunk_bytes: size at which files are split, and bytes of a tensor that are hashed together.
        disks: the disks of the nodes; None: all ranks see the same folder.

    Raises:
        CheckpointArgumentError: folder, tag or state cannot be used, or ranks name different folders.
        CheckpointError: any other failure; the same on all ranks.
    """
    ranks = ranks or default_ranks()
    return plan_save(directory, tag, ranks=ranks, **options).run(ranks)


def _nothing() -> None:
    """Does nothing; the ranks above 0 call this while rank 0 works."""


# - Phase 3


def write_pieces(
    plan: WritePlan,
    pieces: Iterable[Piece],
    writes: Callable[[PieceKey], bool],
    folder: Path,
    known: Known | None = None,
) -> Written:
    """Write the pieces of this rank that `writes` selects, hash all pieces, and flush.

    Args:
        known: registers of pieces that need not be written, because they are in linked files.
    """
    written: Written = {}
    by_file: dict[str, list[Piece]] = {}
    for piece in pieces:
        registers = (known or {}).get((piece.family, piece.spec.name, piece.region))
        if registers is not None:
            written.setdefault((piece.family, piece.spec.name), []).append((piece.region, registers))
            continue
        by_file.setdefault(plan.placed[piece.family][piece.spec.name].file, []).append(piece)
    for file, members in by_file.items():
        with writing(folder / file) as target:
            for piece in members:
                registers = _write_piece(target, plan, piece, writes)
                written.setdefault((piece.family, piece.spec.name), []).append((piece.region, registers))
    return written


def _write_piece(file: FileWriter, plan: WritePlan, piece: Piece, writes: Callable[[PieceKey], bool]) -> dict[int, int]:
    family, name = piece.family, piece.spec.name
    values, sums = piece.fetch().detach().reshape(-1), Sums(plan.chunks(family, name))
    if values.numel() != piece.region.numel:
        raise CheckpointError(f"{shown(name)}: got {values.numel()} values for {piece.region.numel} elements")
    if writes((family, name, piece.region)):
        write_region(file, plan.placed[family][name], piece.region, values, sums)
        if not piece.in_memory:
            file.wait()
    else:  # another rank writes its replica; this rank only computes the hash
        hash_region(piece.spec, piece.region, values, sums)
    return sums.registers()


# - Phase 4, and the steps of rank 0 before phase 3


@dataclass(frozen=True)
class Rank0:
    """The steps of a save that rank 0 does for all ranks."""

    lock: ExitStack
    plan: WritePlan
    temporary: Path
    target: Path
    latest: bool
    keeping: Keeping

    def prepare(self) -> Candidates:
        """Take the lock of the folder and make all files with their full size, except those that may be linked."""
        self.lock.enter_context(saving(self.target.parent, self.target.name))
        check_target(self.target, latest=self.latest)
        self.temporary.mkdir()
        candidates = find_candidates(self.plan, self.target.parent, self.keeping.most_sharing)
        for file in self.plan.files:
            if file.name not in candidates:
                create(self.temporary / file.name, file.header, file.size)
        if self.plan.map_text:
            create(self.temporary / WEIGHT_MAP_NAME, self.plan.map_text, len(self.plan.map_text))
        return candidates

    def link_or_make(self, candidates: Candidates, intact: list[str]) -> list[str]:
        """Link the files that have not changed and make the others; returns the names of the linked ones."""
        linked = [name for name in intact if link(candidates[name][0], self.temporary / name)]
        for file in self.plan.files:
            if file.name in candidates and file.name not in linked:
                create(self.temporary / file.name, file.header, file.size)
        return linked

    def commit(self, written: list[Written], state: Any) -> None:
        """Write the index with all hashes and give the checkpoint its name."""
        text = build_index(self.plan, written, state, self.latest).to_json()
        parse_index(text, str(self.target / INDEX_NAME))  # a checkpoint that could not be read is not committed
        replace_text(self.temporary / INDEX_NAME, text)
        remove_replaced(publish(self.temporary, self.target, latest=self.latest))

    def clean_up(self) -> None:
        """Remove older checkpoints, and give up the lock of the folder."""
        self.keeping.remove_others(self.target)
        self.lock.close()


def build_index(plan: WritePlan, written: list[Written], state: Any, latest: bool) -> Index:
    """The index of a checkpoint, from the hashes of all ranks.

    Raises:
        CheckpointError: ranks hold different values of elements that should be equal.
    """
    headers = {file.name: (file.size, file.header) for file in plan.files}
    if plan.map_text:
        headers[WEIGHT_MAP_NAME] = (len(plan.map_text), plan.map_text)
    tensors = {
        family: {name: _entry(plan, written, family, name) for name in plan.placed[family]} for family in FAMILIES
    }
    return Index(
        files={name: FileEntry(size, len(header), zlib.crc32(header)) for name, (size, header) in headers.items()},
        tensors=tensors,
        aliases=dict(plan.aliases),
        excluded=plan.excluded,
        scalars={key: dict(values) for key, values in plan.scalars.items()},
        state=state,
        ranks=plan.rank_states,
        latest=latest,
        writer=f"dsx {__version__}",
        chunk_bytes=plan.chunk_bytes,
    )


def _entry(plan: WritePlan, written: list[Written], family: str, name: str) -> Entry:
    """A tensor's place and the hashes of its chunks, from the registers of the ranks' regions."""
    placed, writers, chunks = plan.placed[family][name], plan.writers[family][name], plan.chunks(family, name)
    registers = [0] * len(chunks)
    first: dict[Region, tuple[int, dict[int, int]]] = {}
    for rank, regions in enumerate(written):
        for region, parts in regions.get((family, name), ()):
            owner, known = first.setdefault(region, (rank, parts))
            if owner == rank:
                for number, register in parts.items():
                    registers[number] ^= register
            elif known != parts and name not in plan.unlike:
                raise CheckpointError(
                    f"{shown(name)} has other values on rank {rank} than on rank {owner}, which should hold the same; "
                    "if they hold different parts of it by model parallelism, say so with `places`; else the ranks' "
                    "models have diverged"
                )
    if {region: owner for region, (owner, _) in first.items()} != dict(writers):
        raise CheckpointCorruptError(f"{shown(name)}: not everything that was planned has been written")
    spans = [chunks.span(number) for number in range(len(chunks))]
    crcs = [crc_of(register, stop - start) for register, (start, stop) in zip(registers, spans)]
    return Entry(placed, plan.chunks(family, name, crcs))
