"""A damaged checkpoint on the disks of the nodes, mended from its copies.

    1) look      each node hashes what it has, part by part of each chunk (`copies.py`); bytes that cannot be read, and
                 headers of files, count as damaged where they are not what the index says
    2) judge     where nodes have different bytes in one place, those are right with which the chunk has its hash
    3) bring     right bytes are sent to the nodes with wrong ones, and written over them

All nodes know the hashes of all parts, so all come to the same judgement. Every byte of the checkpoint is read: this is
for a load that has found damage, not for every load.

Left out: chunks of which more than `_MOST` parts differ between nodes. They are given up, as those of which no node has
right bytes.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsx_core import sync_folder

from ..crc import Sums
from ..files import opened
from ..format import Index
from ..ranks import Ranks
from ..spans import Range, Spans
from .copies import ChunkKey, Layout
from .topology import Nodes
from .transfers import in_rounds, run_transfers, transfers_between

__all__ = ["Damage", "judge", "mend"]

_MOST = 8
"""Parts of one chunk that may differ between nodes: their copies are tried in all combinations."""

Sight = int | None
"""The register of a part as a node has it; None where it cannot be read."""


@dataclass(frozen=True)
class Damage:
    """What is wrong, and who has it right.

    Attributes:
        wrong: node -> its wrong bytes, by the node that has the right ones.
        lost: bytes of which no node has the right ones.
        sizes: nodes with files that are missing, or of another size: perhaps only where they need no bytes.
    """

    wrong: Mapping[int, Mapping[int, Spans]]
    lost: Spans
    sizes: frozenset[int] = frozenset()

    @property
    def nodes(self) -> list[int]:
        """Those that have damage."""
        return sorted({*self.wrong, *self.sizes})

    @property
    def nbytes(self) -> int:
        """Wrong bytes that can be mended."""
        return sum(spans.nbytes for by_source in self.wrong.values() for spans in by_source.values())


def mend(nodes: Nodes, folders: Mapping[int, Path], index: Index, have: Sequence[Spans], ranks: Ranks) -> Damage:
    """Find damage on all nodes and mend it; nothing is written where bytes are lost. Collective, with the same result
    on all ranks.

    Args:
        folders: node -> its folder of the checkpoint; nodes without one are left out.
        have: per node, the bytes that it has.

    Raises:
        CheckpointError: a disk cannot be written; the same on all ranks.
    """
    me, layout = nodes.of_rank[ranks.rank], Layout.of_index(index.tensors)
    parts = _parts(layout, index, have)

    def look() -> tuple[list[Sight], bool]:
        sights = [_look(folders[me], layout, parts[number]) for number in _to_look_at(parts, nodes, ranks.rank)]
        return sights, me in folders and not _has_its_sizes(folders[me], index)

    seen: list[dict[int, Sight]] = [{} for _ in parts]
    sizes = set()
    for rank, (sights, wrong) in enumerate(ranks.run("looking for damage", look)):
        node = nodes.of_rank[rank]
        sizes |= {node} if wrong else set()
        for number, sight in zip(_to_look_at(parts, nodes, rank), sights, strict=True):
            seen[number][node] = sight
    damage = replace(judge(parts, seen, index), sizes=frozenset(sizes))
    if damage.lost:
        return damage
    transfers = in_rounds(
        nodes,
        [
            transfer
            for node, by_source in damage.wrong.items()
            for source, spans in by_source.items()
            for transfer in transfers_between(nodes, source, node, spans)
        ],
    )

    def make_room() -> None:
        if me in damage.sizes and nodes.leads(ranks.rank):
            _make_whole(folders[me], index)

    ranks.keep("mending files", make_room)
    if transfers:
        # a node without a folder takes part in no transfer
        ranks.keep("mending files", lambda: run_transfers(ranks, transfers, folders.get(me, Path())))
    return damage


# - What there is


@dataclass(frozen=True)
class Part:
    """Bytes [begin, end) of a file, which lie in one chunk (None: in the header) and on the same nodes throughout."""

    file: str
    begin: int
    end: int
    chunk: ChunkKey | None
    nodes: tuple[int, ...]

    @property
    def range(self) -> Range:
        """Where it lies."""
        return self.file, self.begin, self.end


def _parts(layout: Layout, index: Index, have: Sequence[Spans]) -> list[Part]:
    """All bytes that some node has; the same list on all ranks."""
    found: list[Part] = []
    for name, file in index.files.items():
        edges = {0, file.header_bytes, file.nbytes}
        edges |= {edge for spans in have for pair in spans.by_file.get(name, ()) for edge in pair}
        for begin, end in itertools.pairwise(sorted(edge for edge in edges if 0 <= edge <= file.nbytes)):
            holders = tuple(node for node, spans in enumerate(have) if spans.covers(name, begin, end))
            if holders and end <= file.header_bytes:
                found.append(Part(name, begin, end, None, holders))
            elif holders:
                found += [Part(name, first, stop, key, holders) for key, first, stop in layout.parts(name, begin, end)]
    return found


def _to_look_at(parts: Sequence[Part], nodes: Nodes, rank: int) -> list[int]:
    """Numbers of the parts that a rank hashes: those of its node, dealt out to the node's ranks."""
    node = nodes.of_rank[rank]
    mine = nodes.ranks_of(node)
    return [number for number, part in enumerate(parts) if node in part.nodes][mine.index(rank) :: len(mine)]


def _look(folder: Path, layout: Layout, part: Part) -> Sight:
    try:
        with opened(folder / part.file, os.O_RDONLY) as fd:
            data = bytearray(part.end - part.begin)
            view, at = memoryview(data), part.begin
            while view:
                got = os.preadv(fd, [view], at)
                if got == 0:
                    return None
                view, at = view[got:], at + got
    except OSError:
        return None
    if part.chunk is None:
        return zlib.crc32(data)
    placed, chunks = layout.place_of(part.file, part.begin)
    sums = Sums(chunks)
    sums.add(part.begin - placed.offset, memoryview(data))
    return sums.registers()[part.chunk[2]]


# - Who is right


def judge(parts: Sequence[Part], seen: Sequence[Mapping[int, Sight]], index: Index) -> Damage:
    """Compare what the nodes have with the hashes. Pure.

    Args:
        seen: of each part, what each node has that holds it.
    """
    by_chunk: dict[ChunkKey | str, list[int]] = {}
    for number, part in enumerate(parts):
        by_chunk.setdefault(part.chunk or part.file, []).append(number)
    wrong: dict[int, dict[int, list[Range]]] = {}
    lost: list[Range] = []
    for key, numbers in by_chunk.items():
        expected = _expected(index, key)
        right = _right(expected, [set(seen[number].values()) - {None} for number in numbers])
        for place, number in enumerate(numbers):
            part = parts[number]
            good = [node for node in part.nodes if right and seen[number].get(node) == right[place]]
            if not good:
                lost.append(part.range)
                continue
            for node in part.nodes:
                if node not in good:
                    wrong.setdefault(node, {}).setdefault(good[0], []).append(part.range)
    return Damage(
        {node: {source: Spans.of(ranges) for source, ranges in by.items()} for node, by in wrong.items()},
        Spans.of(lost),
    )


def _expected(index: Index, key: ChunkKey | str) -> int:
    """The register of a chunk, or the hash of a file's header."""
    if isinstance(key, str):
        return index.files[key].header_crc
    family, name, number = key
    return index.tensors[family][name].chunks.expected(number)


def _right(expected: int, choices: Sequence[set[int | None]]) -> tuple[int, ...] | None:
    """One of the registers of each part, so that their xor is the expected one; None where there are none such."""
    if not all(choices) or sum(len(found) > 1 for found in choices) > _MOST:
        return None
    for chosen in _combinations(choices):
        total = 0
        for register in chosen:
            total ^= register
        if total == expected:
            return chosen
    return None


def _combinations(choices: Sequence[set[int | None]]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(sorted(one for one in found if one is not None) for found in choices))


def _has_its_sizes(folder: Path, index: Index) -> bool:
    try:
        return all((folder / name).stat().st_size == file.nbytes for name, file in index.files.items())
    except OSError:
        return False


def _make_whole(folder: Path, index: Index) -> None:
    """Let every file be there in its size: it may have been cut short, or removed."""
    for name, file in index.files.items():
        with opened(folder / name, os.O_RDWR | os.O_CREAT) as fd:
            if os.fstat(fd).st_size != file.nbytes:
                os.ftruncate(fd, file.nbytes)
                os.fsync(fd)
    sync_folder(folder)
