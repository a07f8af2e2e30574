"""Each rank's part of the plan of a save, which rank 0 sends it.

A rank needs the places of its own pieces alone (`RankPlan`), and how their hashes are put together (`registers.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import columns
from .announcing import Holding, PieceKey, stored_name
from .crc import Chunks
from .format import CLIENT, Placed
from .planning import PlannedRow, WritePlan
from .snapshot import Piece
from .writers import KeySet

__all__ = ["RankPlan", "Share", "Written", "key_of", "make_shares"]

Written = Mapping[PieceKey, Mapping[int, int]]
"""The pieces of one rank, with the registers of their chunks."""

_WIDTH = 5


@dataclass(frozen=True)
class Share:
    """A rank's part of a plan, as it is sent.

    Attributes:
        plan: which plan.
        files: the files of this rank's pieces, by number.
        rows: five numbers per piece: of its file; its tensor's offset there; the number of the tensor's first chunk
            among those of all tensors; 1 if this rank writes it; the number of the set of ranks that hold it, or 0.
        chunk_bytes: bytes of a tensor that are hashed together.
        flushes: in a job on many hosts the files that this rank flushes, once all ranks of its host have written; None:
            each rank flushes what it writes.
    """

    plan: str
    files: dict[int, str]
    rows: array[int]
    chunk_bytes: int
    flushes: tuple[str, ...] | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.plan, self.files, columns.to_bytes(self.rows, _WIDTH), self.chunk_bytes, self.flushes)


@dataclass(frozen=True)
class RankPlan:
    """A rank's part of a plan.

    Attributes:
        plan: which plan; no two have the same.
        placed: family and name -> place, of this rank's pieces.
        writes: piece -> whether this rank writes it.
        firsts: of each piece the number of its tensor's first chunk, among those of all tensors.
        counts: of each piece whether its registers are those of the index; where each node has a disk, several ranks
            write a piece.
        holders: of each piece the number of the set of ranks that hold it and must have the same values, or 0.
        chunk_bytes, flushes: see `Share`.
    """

    plan: str
    placed: Mapping[tuple[str, str], Placed] = field(repr=False)
    writes: Mapping[PieceKey, bool] = field(repr=False)
    firsts: Sequence[int] = field(repr=False)
    counts: Sequence[int] = field(repr=False)
    holders: Sequence[int] = field(repr=False)
    chunk_bytes: int
    flushes: tuple[str, ...] | None

    @staticmethod
    def of(share: Share, pieces: Sequence[Piece]) -> RankPlan:
        """The part of the rank that has these pieces."""
        files, offsets, firsts, counts, holders = (share.rows[column::_WIDTH] for column in range(_WIDTH))
        placed: dict[tuple[str, str], Placed] = {}
        for piece, file, offset in zip(pieces, files, offsets):
            placed[piece.family, piece.spec.name] = Placed(piece.spec, share.files[file], offset)
        writes = {key_of(piece): bool(flag) for piece, flag in zip(pieces, counts)}
        return RankPlan(share.plan, placed, writes, firsts, counts, holders, share.chunk_bytes, share.flushes)

    def place(self, piece: Piece) -> Placed:
        """The place of a piece's tensor."""
        return self.placed[piece.family, piece.spec.name]

    def chunks(self, piece: Piece) -> Chunks:
        """The chunks in which its tensor is hashed."""
        return Chunks.grid(piece.spec.nbytes, self.chunk_bytes, ())


def key_of(piece: Piece) -> PieceKey:
    """Family, name and region of a piece."""
    return piece.family, piece.spec.name, piece.region


def make_shares(plan: WritePlan, name: str, ranks: Sequence[int], hosts: Sequence[int]) -> dict[int, Share]:
    """The parts of a plan of these ranks; `hosts`: the host of each rank of the job."""
    table = _Tables(plan)
    tables = {rank: table.of(rank) for rank in (range(len(hosts)) if plan.striped else ranks)}
    flushes = _flushes(tables, hosts) if plan.striped else None
    return {
        rank: Share(name, *tables[rank], plan.chunk_bytes, None if flushes is None else tuple(flushes.get(rank, ())))
        for rank in ranks
    }


class _Tables:
    """Makes `files` and `rows` of the shares of all ranks.

    Most pieces are those of one rank alone, and neighbours hold parts of the same tensors. So the rows of a tensor and
    its states are kept from one rank to the next.
    """

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        self._numbers = {file.name: number for number, file in enumerate(plan.files)}
        self._before: dict[tuple[str, int], tuple[int, ...]] = {}
        self._key_sets: dict[KeySet, int] = {}

    def of(self, rank: int) -> tuple[dict[int, str], array[int]]:
        """Those of a rank."""
        plan = self._plan
        catalogue, number = plan.told.of_rank[rank]
        names, holding = plan.told.names[catalogue], plan.told.holdings[number]
        rows = array("q")
        if plan.has_replicas:
            self._one_by_one(rank, rows)
        else:
            self._all_alone(names, holding, rows)
        for client in plan.clients(rank):
            rows.extend((*self._place(CLIENT, client), plan.client_writer(client) == rank, 0))
        return {number: plan.files[number].name for number in sorted(set(rows[::_WIDTH]))}, rows

    def _all_alone(self, names: Sequence[str], holding: Holding, rows: array[int]) -> None:
        """Add the rows of a rank when no rank holds what another one holds."""
        before, kept, key_sets = self._before, {}, holding.key_sets
        sets = [self._key_sets.setdefault(keys, len(self._key_sets)) for keys in key_sets]
        numbers = iter(holding.rows)
        for tensor, _, start, stop, keys in zip(*[numbers] * 5):  # `rows` of the plan would take twice the time
            if start < stop:
                key = names[tensor], sets[keys]
                found = kept.get(key)
                if found is None:
                    found = kept[key] = before.get(key) or self._alone(names[tensor], key_sets[keys])
                rows.extend(found)
        self._before = kept

    def _one_by_one(self, rank: int, rows: array[int]) -> None:
        before, kept = self._before, {}
        for row in self._plan.rows(rank):
            if row.replicated:
                for key, _ in row.keys:
                    rows.extend(self._shared(rank, row, key))
                continue
            key = row.name, self._key_sets.setdefault(row.keys, len(self._key_sets))
            found = kept.get(key) or before.get(key) or self._alone(row.name, row.keys)
            kept[key] = found
            rows.extend(found)
        self._before = kept

    def _alone(self, name: str, keys: KeySet) -> tuple[int, ...]:
        """Rows of what one rank alone holds, and writes."""
        found: list[int] = []
        placed, numbers, firsts = self._plan.placed, self._numbers, self._plan.first_chunks
        for key, _ in keys:
            stored = stored_name(key, name)
            one = placed[stored[0]][stored[1]]
            found += (numbers[one.file], one.offset, firsts[stored], 1, 0)
        return tuple(found)

    def _shared(self, rank: int, row: PlannedRow, key: str) -> tuple[int, ...]:
        family, name = stored_name(key, row.name)
        writes = self._plan.writer(row, key) == rank
        return (*self._place(family, name), writes, self._plan.holders.get((family, name, row.spot), 0))

    def _place(self, family: str, name: str) -> tuple[int, int, int]:
        placed = self._plan.placed[family][name]
        return self._numbers[placed.file], placed.offset, self._plan.first_chunks[family, name]


def _restored(plan: str, files: dict[int, str], rows: bytes, chunk_bytes: int, flushes: Any) -> Share:
    return Share(plan, files, columns.from_bytes(rows, _WIDTH), chunk_bytes, flushes)


def _flushes(tables: Mapping[int, tuple[Mapping[int, str], array[int]]], hosts: Sequence[int]) -> dict[int, list[str]]:
    """Rank -> the files that it flushes for its host: one flush for each file and host, by the writer that has the
    least to do.
    """
    writers: dict[tuple[str, int], list[int]] = {}
    busy: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        names, rows = tables[rank]
        files = {names[number] for number, writes in set(zip(rows[::_WIDTH], rows[3::_WIDTH])) if writes}
        busy[rank] = len(files)
        for file in files:
            writers.setdefault((file, host), []).append(rank)
    found: dict[int, list[str]] = {}
    for (file, _), ranks in sorted(writers.items()):
        chosen = min(ranks, key=busy.__getitem__)
        busy[chosen] += 1
        found.setdefault(chosen, []).append(file)
    return found
