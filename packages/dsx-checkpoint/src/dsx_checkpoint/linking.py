"""Links files whose content has not changed since the last checkpoint, instead of writing them again.

Frozen parameters are in separate files (`plan.py`), which training does not change. Before such a file is written, all
ranks hash their parts of it. If the hashes equal those in the index of the last checkpoint, the ranks read the existing
file and compare its bytes with these hashes. If they are equal, the new checkpoint gets a hard link to it; a damaged
file is written again. Without this check one flipped bit would get into every later checkpoint.

Linked checkpoints share the bytes, so damage that comes later is in all of them. So at most `Keeping.most_sharing`
checkpoints share a file; then it is written again.

If the file system has no hard links, or too many of them exist, the file is written as usual.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from .announcing import PieceKey
from .crc import Chunks, Sums, crc_of
from .errors import CheckpointError
from .files import opened, read_text, register_of_chunk
from .folder import newest_meant_as_latest
from .format import INDEX_NAME
from .parsing import parse_index
from .plan import FilePlan
from .planning import WritePlan
from .regions import hash_region
from .registers import Registers
from .shares import RankPlan, key_of
from .snapshot import Piece

logger = logging.getLogger("dsx.checkpoint")

Candidates = dict[str, tuple[str, dict[str, tuple[int, ...]]]]
"""File -> the path of the old file, and the hashes of the tensors in it."""
Known = dict[PieceKey, dict[int, int]]
"""Registers of the chunks of pieces that were hashed already."""
Suspects = tuple[Candidates, list[FilePlan]]
"""Files of the last checkpoint whose bytes one rank looks at."""


def find_candidates(plan: WritePlan, root: Path, most_sharing: int) -> Candidates:
    """Files of the plan that the newest checkpoint in `root` may have already. Called by one process.

    Args:
        most_sharing: checkpoints that may share a file, the new one included.
    """
    steady = [file for file in plan.files if file.name in plan.steady]
    newest = newest_meant_as_latest(root) if steady else None
    if newest is None:
        return {}
    try:
        index = parse_index(read_text(root / newest / INDEX_NAME), newest)
    except (CheckpointError, OSError) as error:
        logger.debug("%s: nothing is linked from it: %s", root / newest, error)
        return {}
    found: Candidates = {}
    for file in steady:
        path, old = root / newest / file.name, index.files.get(file.name)
        entries = {n: e for family in index.tensors.values() for n, e in family.items() if e.placed.file == file.name}
        same = index.chunk_bytes == plan.chunk_bytes and {e.placed for e in entries.values()} == set(file.tensors)
        size, names = _size_and_names_of(path)
        if old is not None and same and size == old.nbytes == file.size and names < most_sharing:
            found[file.name] = (str(path), {name: tuple(entry.chunks.crcs) for name, entry in entries.items()})
    return found


def _size_and_names_of(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return -1, 0
    return found.st_size, found.st_nlink


def hash_pieces(plan: RankPlan, pieces: Iterable[Piece], files: Collection[str]) -> dict[PieceKey, dict[int, int]]:
    """Registers of this rank's pieces that lie in `files`."""
    known: dict[PieceKey, dict[int, int]] = {}
    for piece in pieces:
        if plan.place(piece).file in files:
            sums = Sums(plan.chunks(piece))
            hash_region(piece.spec, piece.region, piece.fetch().detach().reshape(-1), sums)
            known[key_of(piece)] = sums.registers()
    return known


def unchanged_files(plan: WritePlan, candidates: Candidates, registers: Registers) -> list[str]:
    """The candidates whose old file has exactly the values that all ranks together hold."""
    chunks = {
        name: (plan.first_chunks[family, name], plan.chunks(family, name))
        for family, members in plan.placed.items()
        for name, placed in members.items()
        if placed.file in candidates
    }
    known = dict(registers.by_number())

    def crcs(name: str) -> tuple[int, ...]:
        first, grid = chunks[name]
        spans = map(grid.span, range(len(grid)))
        return tuple(crc_of(known.get(first + i, 0), stop - start) for i, (start, stop) in enumerate(spans))

    return [file for file, (_, hashes) in candidates.items() if all(crcs(n) == old for n, old in hashes.items())]


def intact_files(chunk_bytes: int, candidates: Candidates, files: Iterable[FilePlan]) -> list[str]:
    """Those of `files` whose old file still has the bytes that were written."""
    return [file.name for file in files if _is_intact(chunk_bytes, file, *candidates[file.name])]


def _is_intact(chunk_bytes: int, file: FilePlan, path: str, hashes: Mapping[str, tuple[int, ...]]) -> bool:
    try:
        with opened(Path(path), os.O_RDONLY) as fd:
            if hasattr(os, "posix_fadvise"):  # the disk is asked, not the memory that has written the file
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if os.pread(fd, file.header_bytes, 0) == file.header and all(
                register_of_chunk(fd, placed, chunks, number) == chunks.expected(number)
                for placed in file.tensors
                for chunks in [Chunks.grid(placed.spec.nbytes, chunk_bytes, hashes[placed.spec.name])]
                for number in range(len(chunks))
            ):
                return True
            why = "its bytes are not those that were saved"
    except (CheckpointError, OSError) as error:
        why = str(error)
    logger.warning(
        "%s is damaged (%s): the new checkpoint gets a file of its own, and older ones with this file cannot be loaded",
        path, why,
    )  # fmt: skip
    return False


def link(old: str, new: Path) -> bool:
    """Make a hard link to the old file; returns False if the file system cannot."""
    try:
        os.link(old, new)
    except OSError as error:
        logger.debug("%s: written again, because it cannot be linked (%s)", new, error)
        return False
    return True
