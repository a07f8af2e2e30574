"""What rank 0 and the other ranks of a save send each other once the plan is made: each rank's part of the plan, and
the hashes of what it wrote.

A rank needs the places of its own pieces alone (`RankPlan`). Of a piece that it writes it sends the register of each
chunk (`crc.py`); of a replica that another rank writes a hash of them is enough.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .announcing import PieceKey
from .crc import Chunks
from .format import Placed
from .planning import Part, WritePlan
from .snapshot import Piece

__all__ = [
    "ONLY_WRITER", "Packed", "RankPlan", "Share", "Written", "digest_of", "is_incomplete", "key_of", "make_shares",
    "pack", "registers_of", "unpack",
]  # fmt: skip

Written = Mapping[PieceKey, Mapping[int, int]]
"""The pieces of one rank, with the registers of their chunks."""

Packed = tuple["array[int]", "array[int]"]
"""Registers of a rank's pieces, in their order: how many there are of each, and the numbers and registers."""

ONLY_WRITER = 1
"""The flags (`WritePlan.table`) of a piece that this rank writes and no other has."""
_MISSING, _DIGEST = 0xFFFFFFFF, 0xFFFFFFFE  # in the place of a count


@dataclass(frozen=True)
class Share:
    """A rank's part of a plan, as it is sent.

    Attributes:
        plan: which plan.
        files: the files of this rank's pieces.
        places: of each piece the number of its file, and its tensor's offset there.
        writes: of each piece 1 if this rank writes it.
        chunk_bytes: bytes of a tensor that are hashed together.
        flushes: in a job on many hosts the files that this rank flushes, once all ranks of its host have written; None:
            each rank flushes what it writes.
    """

    plan: str
    files: tuple[str, ...]
    places: array[int]
    writes: bytes
    chunk_bytes: int
    flushes: tuple[str, ...] | None


@dataclass(frozen=True)
class RankPlan:
    """A rank's part of a plan.

    Attributes:
        plan: which plan; no two have the same.
        placed: family and name -> place, of this rank's pieces.
        writes: piece -> whether this rank writes it, in the order in which rank 0 expects them.
        chunk_bytes, flushes: see `Share`.
    """

    plan: str
    placed: Mapping[tuple[str, str], Placed] = field(repr=False)
    writes: Mapping[PieceKey, bool] = field(repr=False)
    chunk_bytes: int
    flushes: tuple[str, ...] | None

    @staticmethod
    def of(share: Share, pieces: Sequence[Piece]) -> RankPlan:
        """The part of the rank that has these pieces."""
        placed: dict[tuple[str, str], Placed] = {}
        for piece, file, offset in zip(pieces, share.places[::2], share.places[1::2]):
            placed[piece.family, piece.spec.name] = Placed(piece.spec, share.files[file], offset)
        writes = {key_of(piece): bool(flag) for piece, flag in zip(pieces, share.writes)}
        return RankPlan(share.plan, placed, writes, share.chunk_bytes, share.flushes)

    def place(self, piece: Piece) -> Placed:
        """Where a piece's tensor lies."""
        return self.placed[piece.family, piece.spec.name]

    def chunks(self, piece: Piece) -> Chunks:
        """The chunks in which its tensor is hashed."""
        return Chunks.grid(piece.spec.nbytes, self.chunk_bytes, ())


def key_of(piece: Piece) -> PieceKey:
    """Family, name and region of a piece."""
    return piece.family, piece.spec.name, piece.region


def make_shares(plan: WritePlan, name: str, ranks: Sequence[int], hosts: Sequence[int]) -> dict[int, Share]:
    """The parts of a plan of these ranks; `hosts`: the host of each rank of the job."""
    flushes = _flushes(plan, hosts) if plan.striped else None
    return {rank: _share(plan, name, rank, None if flushes is None else tuple(flushes.get(rank, ()))) for rank in ranks}


def _share(plan: WritePlan, name: str, rank: int, flushes: tuple[str, ...] | None) -> Share:
    numbers: dict[str, int] = {}
    places, writes = array("q"), bytearray()
    for part in plan.parts(rank):
        placed = plan.placed[part.family][part.name]
        places.extend((numbers.setdefault(placed.file, len(numbers)), placed.offset))
        writes.append(part.writer == rank)
    return Share(name, tuple(numbers), places, bytes(writes), plan.chunk_bytes, flushes)


def _flushes(plan: WritePlan, hosts: Sequence[int]) -> dict[int, list[str]]:
    """Rank -> the files that it flushes for its host: one flush for each file and host, by the writer that has the
    least to do.
    """
    writers: dict[tuple[str, int], list[int]] = {}
    busy: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        files = {plan.placed[part.family][part.name].file for part in plan.parts(rank) if part.writer == rank}
        busy[rank] = len(files)
        for file in files:
            writers.setdefault((file, host), []).append(rank)
    found: dict[int, list[str]] = {}
    for (file, _), ranks in sorted(writers.items()):
        chosen = min(ranks, key=busy.__getitem__)
        busy[chosen] += 1
        found.setdefault(chosen, []).append(file)
    return found


def pack(plan: RankPlan, written: Written) -> Packed:
    """The registers of pieces, for rank 0. Pieces that are not in `written` are marked as missing."""
    counts, values = array("I"), array("I")
    for key, writes in plan.writes.items():
        registers = written.get(key)
        if registers is None:
            counts.append(_MISSING)
        elif writes:
            counts.append(len(registers))
            for number, register in registers.items():
                values.extend((number, register))
        else:
            counts.append(_DIGEST)
            values.frombytes(digest_of(registers))
    return counts, values


def digest_of(registers: Mapping[int, int]) -> bytes:
    """A hash of eight bytes."""
    data = array("I", (value for item in sorted(registers.items()) for value in item))
    return hashlib.blake2b(data.tobytes(), digest_size=8).digest()


def unpack(plan: WritePlan, rank: int, packed: Packed) -> Iterator[tuple[Part, Mapping[int, int] | bytes | None]]:
    """The pieces of a rank, each with its registers, or a hash of them; None: it is missing."""
    counts, values = packed
    at = 0
    for part, count in zip(plan.parts(rank), counts):
        if count == _MISSING:
            yield part, None
        elif count == _DIGEST:
            yield part, values[at : at + 2].tobytes()
            at += 2
        else:
            end = at + 2 * count
            yield part, dict(zip(values[at:end:2], values[at + 1 : end : 2]))
            at = end


def is_incomplete(packed: Packed) -> bool:
    """Whether a piece is missing."""
    return _MISSING in packed[0]


def registers_of(packed: Packed, firsts: Sequence[int], flags: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The registers of the pieces that a rank writes for all, each with the number of its chunk among all chunks.

    Args:
        firsts, flags: see `WritePlan.table`.
    """
    counts, values = packed
    at = 0
    for first, flag, count in zip(firsts, flags, counts):
        if count < _DIGEST:
            end = at + 2 * count
            if flag & ONLY_WRITER:
                for i in range(at, end, 2):
                    yield first + values[i], values[i + 1]
            at = end
        elif count == _DIGEST:
            at += 2
