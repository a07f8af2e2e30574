"""Links files whose content has not changed since the last checkpoint, instead of writing them again.

Frozen parameters are in separate files (`plan.py`), which training does not change. Before such a file is written, all
ranks hash their parts of it. If the hashes equal those in the index of the last checkpoint, the new checkpoint gets a
hard link to the existing file. Checkpoints stay independent: the file's bytes are deleted with the last link. The old
file is not read again for this; `dsx checkpoint verify` reads it.

If the file system has no hard links, or too many of them exist, the file is written as usual.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..utils.logging import logger
from .boxes import Region
from .crc import Sums, crc_of
from .errors import CheckpointError
from .files import read_text
from .folder import newest_meant_as_latest
from .format import INDEX_NAME
from .parsing import parse_index
from .plan import WritePlan
from .regions import hash_region
from .snapshot import Piece

Candidates = dict[str, tuple[str, dict[str, tuple[int, ...]]]]
"""File -> the path of the old file, and the hashes of the tensors in it."""
Known = dict[tuple[str, str, Region], dict[int, int]]
"""(family, name, region) -> registers of its chunks, for regions that were hashed already."""


def find_candidates(plan: WritePlan, root: Path) -> Candidates:
    """Files of the plan that the newest checkpoint in `root` may have already. Called by one process."""
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
        if old is not None and same and _size_of(path) == old.nbytes == file.size:
            found[file.name] = (str(path), {name: tuple(entry.chunks.crcs) for name, entry in entries.items()})
    return found


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def hash_pieces(plan: WritePlan, pieces: Iterable[Piece], files: Mapping[str, object]) -> Known:
    """Registers of this rank's pieces that lie in `files`."""
    known: Known = {}
    for piece in pieces:
        family, name = piece.family, piece.spec.name
        if plan.placed[family][name].file in files:
            sums = Sums(plan.chunks(family, name))
            hash_region(piece.spec, piece.region, piece.fetch().detach().reshape(-1), sums)
            known[family, name, piece.region] = sums.registers()
    return known


def unchanged_files(plan: WritePlan, candidates: Candidates, everyone: Iterable[Known]) -> list[str]:
    """The candidates whose old file has exactly the values that all ranks together hold."""
    registers: dict[str, list[int]] = {}
    chunks = {name: plan.chunks(family, name) for family, placed in plan.placed.items() for name in placed}
    seen: set[tuple[str, str, Region]] = set()
    for known in everyone:
        for key, parts in known.items():
            if key not in seen:  # of replicas one is enough
                seen.add(key)
                total = registers.setdefault(key[1], [0] * len(chunks[key[1]]))
                for number, register in parts.items():
                    total[number] ^= register

    def crcs(name: str) -> tuple[int, ...]:
        spans = (chunks[name].span(number) for number in range(len(chunks[name])))
        return tuple(crc_of(r, stop - start) for r, (start, stop) in zip(registers.get(name, ()), spans))

    return [file for file, (_, hashes) in candidates.items() if all(crcs(n) == old for n, old in hashes.items())]


def link(old: str, new: Path) -> bool:
    """Make a hard link to the old file; returns False if the file system cannot."""
    try:
        os.link(old, new)
    except OSError as error:
        logger.debug("%s: written again, because it cannot be linked (%s)", new, error)
        return False
    return True
