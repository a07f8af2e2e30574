"""Writes a checkpoint in four phases, each of which is an object or a function:

    1) snapshot   every rank lists what it holds (`snapshot.py`)
    2) plan       rank 0 makes files, offsets, and which rank writes what of it (`planning.py`), or takes the plan of an
                  earlier save, and gives each rank its part (`agreeing.py`)
    3) write      rank 0 makes a temporary folder with the files at full size, or with links to files that have not
                  changed (`linking.py`); every rank writes and hashes its pieces, and flushes
    4) commit     rank 0 gets the hashes, writes the index and renames the folder: from then on the checkpoint exists;
                  then `latest` is replaced, and old checkpoints are removed (`keeping.py`)

All ranks do every step, and a failure on one rank is raised on all. Until the rename, existing checkpoints are not
changed. A process that is killed before leaves a `.tmp-` folder, which the next save removes (`folder.py`).

Phases 1 and 2 make a `PlannedSave`. `behind.py` runs phases 3 and 4 on a separate thread, with copies of the pieces.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dsx_core import replace_text
from torch import nn

from .agreeing import WholePlan, agree
from .announcing import PieceKey
from .crc import Sums
from .direct import FileWriter, writing
from .errors import CheckpointError, shown
from .files import check_space, create
from .folder import (
    check_folder,
    check_one_folder,
    check_tag,
    check_target,
    publish,
    remove_replaced,
    temporary_name,
)
from .format import CHUNK_BYTES, INDEX_NAME, WEIGHT_MAP_NAME
from .indexing import build_index
from .keeping import Keeping
from .linking import Candidates, Known, Suspects, find_candidates, hash_pieces, intact_files, link, unchanged_files
from .parsing import parse_index
from .plan import MAX_FILE_BYTES, FilePlan
from .ranks import Ranks, default_ranks
from .regions import hash_region, write_region
from .registers import Registers, collect_registers, each_counted
from .saving_lock import saving
from .shares import RankPlan, Written, key_of
from .snapshot import Piece, Place, Snapshot


class Disks(Protocol):
    """The disks of the ranks: one folder that all see (`SharedDisk`), or one on each node (`nodes.disks.NodeDisks`)."""

    def check_folders(self, call: str, paths: Sequence[str]) -> None:
        """Raise `CheckpointArgumentError` unless ranks that see the same disk name the same folder."""
        ...

    def planned(self, planned: PlannedSave, ranks: Ranks) -> PlannedSave:
        """The plan that is carried out on these disks. Collective."""
        ...


class SharedDisk:
    """All ranks see one folder."""

    def check_folders(self, call: str, paths: Sequence[str]) -> None:
        """See `Disks`."""
        check_one_folder(call, paths)

    def planned(self, planned: PlannedSave, ranks: Ranks) -> PlannedSave:
        """See `Disks`."""
        return planned


@dataclass(frozen=True)
class PlannedSave:
    """A planned save. The rest can be done at once, or later on a separate thread.

    Attributes:
        plan: this rank's part of the plan.
        whole: on rank 0 the whole plan; None on the others.
        pieces: the pieces of this rank: views of the model's tensors, or copies of them (`copied`).
        state: the encoded state.
        temporary, target: the folder that is written, and its final name.
        latest: whether `latest` will name it.
        keeping: which older checkpoints are removed afterwards.
    """

    plan: RankPlan
    whole: WholePlan | None
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
        # The lock is held by rank 0; files that a rank flushes for its host stay open until all ranks have written.
        with ExitStack() as lock, ExitStack() as files:
            only_zero = self._rank0(lock)
            try:
                candidates = ranks.first_for_all(f"making {temporary}", only_zero.prepare if only_zero else list)
                known = self._link(ranks, only_zero, candidates) if candidates else {}

                def write() -> Written:
                    return write_pieces(plan, self.pieces, temporary, known, files)

                def close() -> Written:
                    files.close()
                    return written

                def commit(found: Registers) -> list[None]:
                    if only_zero is not None:
                        only_zero.commit(found, self.state)
                    return [None] * ranks.world_size

                if plan.flushes is not None:
                    written = ranks.keep(f"writing {target}", write)
                collect_registers(
                    ranks,
                    f"writing {target}",
                    plan,
                    write if plan.flushes is None else close,
                    commit,
                    answering=f"committing {target}",
                )
            except BaseException:
                if ranks.rank == 0:
                    shutil.rmtree(temporary, ignore_errors=True)
                raise
            # Together: a rank that goes on before would still see what is removed, and a folder that is locked.
            clean_up = only_zero.clean_up if only_zero else _nothing
            ranks.keep(f"removing what {target} replaces", clean_up)
        return target

    def _link(self, ranks: Ranks, only_zero: Rank0 | None, candidates: list[str]) -> Known:
        """Link files that have not changed. Returns the registers of this rank's pieces in them. Collective."""
        plan, doing = self.plan, f"comparing with the checkpoint before {self.target}"
        known: Known = {}

        def hash_mine() -> Registers:
            known.update(hash_pieces(plan, self.pieces, candidates))
            return Registers.of(dict(each_counted(plan, known)))

        def unchanged(registers: Registers) -> list[Suspects]:
            return only_zero.deal_out(registers, ranks.world_size) if only_zero else []

        suspects: Suspects = ranks.joined_first(doing, hash_mine, Registers.joined, unchanged)

        def linked(everyone: list[list[str]]) -> list[list[str]]:
            made = only_zero.link_or_make([name for names in everyone for name in names]) if only_zero else []
            return [made] * len(everyone)

        names = ranks.through_first(
            doing, lambda: intact_files(plan.chunk_bytes, *suspects), linked, answering=f"making {self.temporary}"
        )
        return {key: registers for key, registers in known.items() if plan.placed[key[0], key[1]].file in names}

    def _rank0(self, lock: ExitStack) -> Rank0 | None:
        if self.whole is None:
            return None
        return Rank0(lock, self.whole, self.temporary, self.target, self.latest, self.keeping)


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

    taken: list[tuple[Path, Snapshot]] = []

    def tell() -> tuple[Snapshot, str]:
        taken.append(take())
        return taken[0][1], os.path.realpath(taken[0][0])

    agreed = agree(
        ranks,
        tell,
        check_folders=lambda paths: disks.check_folders("save", paths),
        max_file_bytes=max_file_bytes,
        chunk_bytes=chunk_bytes,
    )
    target, snapshot = taken[0]
    temporary = target.with_name(temporary_name(target.name, agreed.unique))
    planned = PlannedSave(
        agreed.plan,
        agreed.whole,
        snapshot.pieces,
        snapshot.state,
        temporary,
        target,
        save_latest,
        keeping or Keeping(),
    )
    return disks.planned(planned, ranks)


def save(directory: str | os.PathLike[str], tag: str, *, ranks: Ranks | None = None, **options: Any) -> Path:
    """Write `<directory>/<tag>/` collectively; returns its path.

    Args:
        module: the module whose persistent buffers are saved; of replicas, those of the lowest rank.
        slices: the slices of this rank (`dsx_zero.state.slices.ParamSlice`: name, aliases, shape, start, stop,
            trainable, param, master, states, ranges). Over all ranks they must cover every parameter; elements that
            several ranks hold must be equal.
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
    plan: RankPlan, pieces: Iterable[Piece], folder: Path, known: Known | None = None, files: ExitStack | None = None
) -> Written:
    """Write the pieces of this rank that it is to write, hash all pieces, and flush.

    Args:
        known: registers of pieces that need not be written, because they are in linked files.
        files: gets the files that this rank flushes for its host, which its closing does.
    """
    written: dict[PieceKey, dict[int, int]] = {}
    by_file: dict[str, list[Piece]] = {}
    for piece in pieces:
        registers = (known or {}).get(key_of(piece))
        if registers is not None:
            written[key_of(piece)] = dict(registers)
            continue
        by_file.setdefault(plan.place(piece).file, []).append(piece)
    for file, members in by_file.items():
        if not any(plan.writes[key_of(piece)] for piece in members):
            written |= {key_of(piece): _write_piece(None, plan, piece) for piece in members}
            continue
        on_its_own = plan.flushes is None
        with ExitStack() as here:
            stack = files if files is not None and not on_its_own and file in (plan.flushes or ()) else here
            flush = on_its_own or stack is not here
            target = stack.enter_context(writing(folder / file, flush=flush, direct=on_its_own))
            for piece in members:
                written[key_of(piece)] = _write_piece(target, plan, piece)
    return written


def _write_piece(file: FileWriter | None, plan: RankPlan, piece: Piece) -> dict[int, int]:
    values, sums = piece.fetch().detach().reshape(-1), Sums(plan.chunks(piece))
    if values.numel() != piece.region.numel:
        raise CheckpointError(
            f"{shown(piece.spec.name)}: got {values.numel()} values for {piece.region.numel} elements"
        )
    if file is not None and plan.writes[key_of(piece)]:
        write_region(file, plan.place(piece), piece.region, values, sums)
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
    whole: WholePlan
    temporary: Path
    target: Path
    latest: bool
    keeping: Keeping
    candidates: Candidates = field(default_factory=dict)

    def prepare(self) -> list[str]:
        """Take the lock of the folder and make all files with their full size, except those that may be linked.

        Returns:
            The names of the files that may be linked.
        """
        plan = self.whole.plan
        self.keeping.wait()
        self.lock.enter_context(saving(self.target.parent, self.target.name))
        check_target(self.target, latest=self.latest)
        if plan.striped:
            check_space(self.target.parent, sum(file.size for file in plan.files))
        self.temporary.mkdir()
        self.candidates.update(find_candidates(plan, self.target.parent, self.keeping.most_sharing))
        for file in plan.files:
            if file.name not in self.candidates:
                self._create(file)
        if plan.map_text:
            create(self.temporary / WEIGHT_MAP_NAME, plan.map_text, len(plan.map_text))
        return list(self.candidates)

    def _create(self, file: FilePlan) -> None:
        # Files of many hosts are sparse: where a file system has no room to give in advance, each block of the whole
        # checkpoint would be touched by this process.
        create(self.temporary / file.name, file.header, file.size, sparse=self.whole.plan.striped)

    def deal_out(self, registers: Registers, ranks: int) -> list[Suspects]:
        """The files whose old ones have the values of all ranks: for each rank those whose bytes it looks at."""
        plan = self.whole.plan
        names = unchanged_files(plan, self.candidates, registers)
        files = {file.name: file for file in plan.files}
        return [
            ({name: self.candidates[name] for name in mine}, [files[name] for name in mine])
            for mine in (names[rank::ranks] for rank in range(ranks))
        ]

    def link_or_make(self, intact: list[str]) -> list[str]:
        """Link the files that have not changed and make the others; returns the names of the linked ones."""
        linked = [name for name in intact if link(self.candidates[name][0], self.temporary / name)]
        for file in self.whole.plan.files:
            if file.name in self.candidates and file.name not in linked:
                self._create(file)
        return linked

    def commit(self, written: Registers, state: Any) -> None:
        """Write the index with all hashes and give the checkpoint its name."""
        text = build_index(self.whole, written, state, self.latest).to_json()
        parse_index(text, str(self.target / INDEX_NAME))  # a checkpoint that could not be read is not committed
        replace_text(self.temporary / INDEX_NAME, text)
        remove_replaced(publish(self.temporary, self.target, latest=self.latest))

    def clean_up(self) -> None:
        """Remove older checkpoints, the bytes of which go behind the caller, and give up the lock of the folder."""
        self.keeping.remove_others(self.target)
        self.lock.close()
