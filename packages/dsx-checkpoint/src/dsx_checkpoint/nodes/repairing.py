"""A damaged checkpoint on the disks of the nodes, mended from its copies.

    1) look      each node hashes what it has. A chunk of which it has the whole is compared there; of others it sends
                 the hash of its part. On the way to rank 0 these are joined, as those of a load are (`reads.py`): parts
                 of neighbours make up chunks, which are compared and dropped. Rank 0 learns which chunks are wrong, or
                 were not compared
    2) again     rank 0 knows who holds these chunks. It has each holder hash its parts once more, one by one
    3) judge     where nodes have different bytes in one place, those are right with which the chunk has its hash
    4) bring     right bytes are sent to the nodes with wrong ones, and written over them

So a rank hears of the damage that it has or mends, and of nothing else; rank 0 hears of all damage. Every byte of the
checkpoint is read: this is for a load that has found damage, not for every load. Bytes that cannot be read count as
damaged; headers of files are chunks, too.

Left out: chunks of which more than `_MOST` parts differ between nodes. They are given up, as those of which no node has
right bytes.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsx_core import sync_folder

from ..boxes import Box, Region
from ..crc import Sums
from ..errors import CheckpointError
from ..files import PIECE_BYTES, opened, read_into
from ..format import Index
from ..ranks import Ranks
from ..reads import Reads
from ..spans import PackedRanges, Range, Spans, pack_ranges, unpack_ranges
from .copies import ChunkKey, Layout
from .topology import Nodes
from .transfers import Holders, Transfer, by_rank, in_rounds, run_transfers, transfers_between

logger = logging.getLogger("dsx.checkpoint")

__all__ = ["Damage", "Judge", "Looked", "Orders", "Part", "judge", "mend", "shares_of_node"]

_MOST = 8
"""Parts of one chunk that may differ between nodes: their copies are tried in all combinations."""

Sight = int | None
"""The register of a part as a node has it; None where it cannot be read."""


@dataclass(frozen=True)
class Damage:
    """Wrong bytes, and the nodes that have the right ones.

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

    def transfers(self, nodes: Nodes) -> list[Transfer]:
        """The messages that mend it."""
        return in_rounds(
            nodes,
            (
                transfer
                for node, by_source in self.wrong.items()
                for source, spans in by_source.items()
                for transfer in transfers_between(nodes, source, node, spans)
            ),
        )


def mend(
    nodes: Nodes, name: str, folder: Path | None, have: Spans, index: Index, holders: Holders, ranks: Ranks
) -> bool:
    """Find damage on all nodes and mend it; nothing is written where bytes are lost. Collective.

    Args:
        name: of the checkpoint, for what rank 0 logs.
        folder: this node's folder of the checkpoint; None: it has none.
        have: the bytes that this node has.
        holders: on rank 0, which nodes hold which bytes.

    Returns:
        Whether there was damage, and all of it was mended; the same on all ranks.

    Raises:
        CheckpointError: a disk cannot be read or written; the same on all ranks.
    """
    layout = Layout.of_index(index)
    first = Judge(nodes, layout, holders)  # of use on rank 0

    def look() -> Looked:
        if folder is None:
            return Looked()
        members = nodes.ranks_of(nodes.of_rank[ranks.rank])
        found = Looked.at(folder, layout, shares_of_node(layout, have, len(members))[members.index(ranks.rank)])
        if nodes.leads(ranks.rank) and not _has_its_sizes(folder, index):
            found.sizes.add(nodes.of_rank[ranks.rank])
        return found

    asked: PackedRanges | None = ranks.joined_first(
        "looking for damage", look, functools.partial(Looked.joined, layout=layout), first.ask
    )
    if asked is None:
        return False

    def look_again() -> list[Sight]:
        return [None if folder is None else _sight(folder, layout, item) for item in unpack_ranges(*asked)]

    def decide(sights: Sequence[Sequence[Sight]]) -> Sequence[Orders | None]:
        damage = first.decide(sights)
        _tell(damage, name)
        return first.orders(damage)

    orders: Orders | None = ranks.through_first("looking at damage again", look_again, decide)
    if orders is None:
        return False

    def make_room() -> None:
        if folder is not None and orders.makes_room:
            _make_whole(folder, index)

    ranks.keep("mending files", make_room)
    # a node without a folder takes part in no transfer
    ranks.keep("mending files", lambda: run_transfers(ranks, orders.transfers, folder or Path()))
    return True


def _tell(damage: Damage, name: str) -> None:
    if damage.lost:
        file, begin, end = next(iter(damage.lost))
        logger.warning(
            "load_checkpoint: %s: %d bytes are damaged on every disk that has them, the first are %d to %d of %s",
            name, damage.lost.nbytes, begin, end, file,
        )  # fmt: skip
    elif damage.nodes:
        logger.warning(
            "load_checkpoint: %s: %d damaged bytes on the disks of nodes %s were written again from copies on other"
            " nodes; look at these disks",
            name, damage.nbytes, damage.nodes,
        )  # fmt: skip


# - What a rank sees


@dataclass
class Looked:
    """The bytes that the nodes have, as far as one rank or several have looked.

    Attributes:
        reads: the bytes of each tensor (`Layout.as_bytes`), with the registers of chunks that no region has the whole
            of. Chunks of which a part cannot be read are wrong.
        sizes: nodes with files that are missing, or of another size.
    """

    reads: Reads = field(default_factory=Reads)
    sizes: set[int] = field(default_factory=set)

    @staticmethod
    def at(folder: Path, layout: Layout, share: Iterable[tuple[ChunkKey, Range]]) -> Looked:
        """Of parts of chunks in the files of a folder."""
        return Looked.of(layout, ((key, item, _sight(folder, layout, item)) for key, item in share))

    @staticmethod
    def of(layout: Layout, seen: Iterable[tuple[ChunkKey, Range, Sight]]) -> Looked:
        """Of parts of chunks and what was seen of them. Pure."""
        found, numbers = Reads(), {key: number for number, key in enumerate(layout.as_bytes)}
        for (family, name, chunk), (_, begin, end), sight in seen:
            number, entry = numbers[family, name], layout.as_bytes[family, name]
            start, stop = begin - entry.placed.offset, end - entry.placed.offset
            whole = (start, stop) == entry.chunks.span(chunk)
            if sight is None or (whole and sight != entry.chunks.expected(chunk)):
                found.wrong.add((number, chunk))
            region = Region(Box.whole(entry.spec.shape), start, stop)
            found.add(number, region, {} if whole else {chunk: sight or 0})
        return Looked.joined(Looked(), Looked(found), layout)  # one region of parts that touch

    @staticmethod
    def joined(one: Looked, other: Looked, layout: Layout) -> Looked:
        """Both. `one` is changed."""
        entries = list(layout.as_bytes.values())
        return Looked(Reads.joined(one.reads, other.reads, entries.__getitem__), one.sizes | other.sizes)


def shares_of_node(layout: Layout, have: Spans, members: int) -> list[list[tuple[ChunkKey, Range]]]:
    """The bytes that a node has, dealt out to its ranks: parts of chunks, of which each rank gets neighbours."""
    parts = [
        (key, (file, first, stop)) for file, begin, end in have for key, first, stop in layout.parts(file, begin, end)
    ]
    edges = [len(parts) * member // members for member in range(members + 1)]
    return [parts[first:stop] for first, stop in itertools.pairwise(edges)]


def _sight(folder: Path, layout: Layout, item: Range) -> Sight:
    """The register of bytes of one chunk."""
    file, begin, end = item
    placed, chunks = layout.place_of(file, begin)
    sums, buffer = Sums(chunks), memoryview(bytearray(min(PIECE_BYTES, end - begin)))
    try:
        with opened(folder / file, os.O_RDONLY) as fd:
            for at in range(begin, end, PIECE_BYTES):
                data = buffer[: min(PIECE_BYTES, end - at)]
                read_into(fd, placed, at - placed.offset, data)
                sums.add(at - placed.offset, data)
    except (OSError, CheckpointError):
        return None
    (register,) = sums.registers().values()
    return register


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


# - What rank 0 makes of it


@dataclass(frozen=True)
class Part:
    """Bytes [begin, end) of a file, which lie in one chunk and on the same nodes throughout."""

    file: str
    begin: int
    end: int
    chunk: ChunkKey
    nodes: tuple[int, ...]

    @property
    def range(self) -> Range:
        """The place in the file."""
        return self.file, self.begin, self.end


@dataclass(frozen=True)
class Orders:
    """The work of one rank when damage is mended.

    Attributes:
        transfers: of which it sends or receives.
        makes_room: it makes the files of its node whole before.
    """

    transfers: Sequence[Transfer]
    makes_room: bool


class Judge:
    """Rank 0's part: it alone knows which nodes hold what. Sends nothing."""

    def __init__(self, nodes: Nodes, layout: Layout, holders: Holders) -> None:
        self._nodes, self._layout, self._holders = nodes, layout, holders
        self._sizes: frozenset[int] = frozenset()
        self._parts: list[Part] = []
        self._asked: list[list[int]] = []  # of each rank numbers of parts

    def ask(self, looked: Looked) -> list[PackedRanges | None]:
        """Of each rank what it has to look at again; None for all of them where there is no damage."""
        ranks = len(self._nodes.of_rank)
        self._sizes = frozenset(looked.sizes)
        chunks = sorted(looked.reads.wrong | looked.reads.left)
        if not chunks and not self._sizes:
            return [None] * ranks
        self._parts = list(self._parts_of(chunks))
        self._asked = [[] for _ in range(ranks)]
        turns = [itertools.cycle(members) for members in self._nodes.members]
        for number, part in enumerate(self._parts):
            for node in part.nodes:
                self._asked[next(turns[node])].append(number)
        nothing = pack_ranges(())
        return [pack_ranges(self._parts[n].range for n in numbers) if numbers else nothing for numbers in self._asked]

    def _parts_of(self, chunks: Iterable[tuple[int, int]]) -> Iterator[Part]:
        tensors = list(self._layout.as_bytes.items())
        for tensor, number in chunks:
            (family, name), entry = tensors[tensor]
            begin, end = (entry.placed.offset + edge for edge in entry.chunks.span(number))
            for (file, first, stop), nodes in self._holders.within((entry.placed.file, begin, end)):
                yield Part(file, first, stop, (family, name, number), nodes)

    def decide(self, sights: Sequence[Sequence[Sight]]) -> Damage:
        """The damage, from what the ranks have seen of what they were asked for."""
        seen: list[dict[int, Sight]] = [{} for _ in self._parts]
        for node, numbers, found in zip(self._nodes.of_rank, self._asked, sights, strict=True):
            for number, sight in zip(numbers, found, strict=True):
                seen[number][node] = sight
        entries = self._layout.as_bytes
        return judge(self._parts, seen, lambda key: entries[key[:2]].chunks.expected(key[2]), self._sizes)

    def orders(self, damage: Damage) -> list[Orders | None]:
        """Of each rank what it does; None for all of them where there is nothing to do, or bytes are lost."""
        nodes = self._nodes
        if damage.lost or not damage.nodes:
            return [None] * len(nodes.of_rank)
        idle = Orders((), makes_room=False)
        return [
            Orders(transfers, makes_room) if transfers or makes_room else idle
            for rank, transfers in enumerate(by_rank(nodes, damage.transfers(nodes)))
            for makes_room in (nodes.leads(rank) and nodes.of_rank[rank] in damage.sizes,)
        ]


def judge(
    parts: Sequence[Part],
    seen: Sequence[Mapping[int, Sight]],
    expected: Callable[[ChunkKey], int],
    sizes: frozenset[int] = frozenset(),
) -> Damage:
    """Compare what the nodes have with the hashes. Pure.

    Args:
        parts: all of each chunk.
        seen: of each part, what each node has that holds it.
        expected: the register of a whole chunk.
        sizes: see `Damage`.
    """
    by_chunk: dict[ChunkKey, list[int]] = {}
    for number, part in enumerate(parts):
        by_chunk.setdefault(part.chunk, []).append(number)
    wrong: dict[int, dict[int, list[Range]]] = {}
    lost: list[Range] = []
    for key, numbers in by_chunk.items():
        right = _right(expected(key), [set(seen[number].values()) - {None} for number in numbers])
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
        sizes,
    )


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
