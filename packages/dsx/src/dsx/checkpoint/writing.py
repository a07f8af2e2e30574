"""Writing a checkpoint, in four phases, each an object or a function of its own:

    1) snapshot   every rank lists what it holds (`snapshot.py`) 2) plan       the lists of all ranks become files,
    offsets, and which rank writes what (`plan.py`) 3) write      rank 0 makes a temporary folder with the files at full
    size; every rank writes and hashes its pieces, and flushes 4) commit     rank 0 writes the index and renames the
    folder: from here on the checkpoint exists; then `latest` is replaced

All ranks take every step, and a failure on one rank becomes the same error on all. Until the rename nothing that was
there before has been touched; a process killed earlier leaves a `.tmp-` folder, which the next save clears away
(`folder.py`).

Left out: asynchronous saving (phases 3 and 4 on another thread, with copies of the pieces).
"""

from __future__ import annotations

import os
import shutil
import uuid
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .._version import __version__
from .boxes import Region
from .crc import Sums, crc_of
from .errors import CheckpointCorruptError, CheckpointError, shown
from .files import create, hash_region, opened, replace_text, write_region
from .folder import check_folder, check_one_folder, check_tag, publish, saving, temporary_name
from .format import CHUNK_BYTES, FAMILIES, INDEX_NAME, WEIGHT_MAP_NAME, Entry, FileEntry, Index
from .parsing import parse_index
from .plan import MAX_FILE_BYTES, Announcement, WritePlan
from .ranks import Ranks, default_ranks
from .snapshot import Piece, Place, Snapshot

Written = dict[tuple[str, str], list[tuple[Region, dict[int, int]]]]
"""(family, name) -> the regions of one rank with the registers of the chunks they lie in (see `crc.py`)."""


def save(
    directory: str | os.PathLike[str],
    tag: str,
    *,
    module: nn.Module,
    slices: Iterable[Any],
    state: dict[str, Any],
    ranks: Ranks | None = None,
    places: Mapping[str, Place] | None = None,
    exclude_frozen: bool = False,
    save_latest: bool = True,
    max_file_bytes: int = MAX_FILE_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> Path:
    """Write `<directory>/<tag>/` collectively; returns its path.

    Args:
        module: its persistent buffers are saved; of replicas the lowest rank's.
        slices: what this rank owns (`dsx_zero.ParamSlice`: name, aliases, shape, start, stop, trainable, param, master,
            states, ranges). Over all ranks they must cover every parameter; what several ranks hold must be equal.
        state: see `encode.py` for what it may hold. Rank 0's is kept.
        ranks: all ranks that hold a part of the model; None: all there are.
        places: for tensors of which this rank holds a part, or that have another name in the whole model.

    Raises:
        CheckpointArgumentError: folder, tag or state cannot be used, or ranks name different folders.
        CheckpointError: anything else; the same on all ranks.
    """
    ranks = ranks or default_ranks()

    def take() -> tuple[Path, Snapshot]:
        target = check_folder(directory, "directory") / check_tag(tag)
        return target, Snapshot.take(
            module, slices, state, rank=ranks.rank, places=places or {}, exclude_frozen=exclude_frozen
        )

    target, snapshot = ranks.all_or_none("listing what to save", take)
    everyone: list[tuple[Announcement, str, str]] = ranks.gather(
        (snapshot.announcement, uuid.uuid4().hex[:12], os.path.realpath(target))
    )
    check_one_folder("save", [path for *_, path in everyone])
    plan = WritePlan.make([a for a, *_ in everyone], max_file_bytes=max_file_bytes, chunk_bytes=chunk_bytes)
    temporary = target.with_name(temporary_name(target.name, everyone[0][1]))
    with ExitStack() as lock:  # rank 0's
        try:
            only_zero = Rank0(lock, plan, temporary, target) if ranks.rank == 0 else None
            ranks.all_or_none(f"making {temporary}", only_zero.prepare if only_zero else _nothing)
            written = ranks.together(
                f"writing {target}", lambda: write_pieces(plan, snapshot.pieces, ranks.rank, temporary)
            )
            commit = (lambda: only_zero.commit(written, snapshot.state, save_latest)) if only_zero else _nothing
            ranks.all_or_none(f"committing {target}", commit)
        except BaseException:
            if ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
    return target


def _nothing() -> None:
    """What ranks above 0 do while rank 0 works."""


# - Phase 3


def write_pieces(plan: WritePlan, pieces: Iterable[Piece], rank: int, folder: Path) -> Written:
    """Write those of this rank's pieces that the plan gives to it, hash all of them, and flush."""
    written: Written = {}
    by_file: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(plan.placed[piece.family][piece.spec.name].file, []).append(piece)
    for file, members in by_file.items():
        with opened(folder / file, os.O_WRONLY) as fd:
            for piece in members:
                registers = _write_piece(fd, plan, piece, rank)
                written.setdefault((piece.family, piece.spec.name), []).append((piece.region, registers))
            os.fsync(fd)
    return written


def _write_piece(fd: int, plan: WritePlan, piece: Piece, rank: int) -> dict[int, int]:
    family, name = piece.family, piece.spec.name
    values, sums = piece.fetch().detach().reshape(-1), Sums(plan.chunks(family, name))
    if values.numel() != piece.region.numel:
        raise CheckpointError(f"{shown(name)}: got {values.numel()} values for {piece.region.numel} elements")
    if plan.writers[family][name][piece.region] == rank:
        write_region(fd, plan.placed[family][name], piece.region, values, sums)
    else:  # another rank writes its replica: this one only says what it has
        hash_region(piece.spec, piece.region, values, sums)
    return sums.registers()


# - Phase 4, and what rank 0 does before phase 3


@dataclass(frozen=True)
class Rank0:
    """The steps of a save that one process does for all."""

    lock: ExitStack
    plan: WritePlan
    temporary: Path
    target: Path

    def prepare(self) -> None:
        """Take the lock of the folder and make all files at their full size."""
        self.lock.enter_context(saving(self.target.parent, self.target.name))
        self.temporary.mkdir()
        for file in self.plan.files:
            create(self.temporary / file.name, file.header, file.size)
        if self.plan.map_text:
            create(self.temporary / WEIGHT_MAP_NAME, self.plan.map_text, len(self.plan.map_text))

    def commit(self, written: list[Written], state: Any, latest: bool) -> None:
        """Write the index with all hashes and give the checkpoint its name."""
        text = build_index(self.plan, written, state, latest).to_json()
        parse_index(text, str(self.target / INDEX_NAME))  # a checkpoint that could not be read is not committed
        replace_text(self.temporary / INDEX_NAME, text)
        publish(self.temporary, self.target, latest=latest)


def build_index(plan: WritePlan, written: list[Written], state: Any, latest: bool) -> Index:
    """The index of what all ranks have written.

    Raises:
        CheckpointError: ranks hold different values where they should hold the same.
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
        latest=latest,
        writer=f"dsx {__version__}",
        chunk_bytes=plan.chunk_bytes,
    )


def _entry(plan: WritePlan, written: list[Written], family: str, name: str) -> Entry:
    """A tensor's place, and the hashes of its chunks from what the ranks say of their regions."""
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
