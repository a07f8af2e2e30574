"""Phase 2 of a save: the place of each tensor's bytes, and the rank that writes them.

Rank 0 alone makes the plan, from what the ranks have told (`announcing.py`), and gives each rank its part of it
(`shares.py`). Ranks that told the same count as one kind, so that the work grows with what is different. The plan of
the last saves is kept: a save of the same tensors in the same layout plans nothing.

Replicas (bytes that several ranks hold) are written by the lowest of these ranks; the others only hash theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .announcing import Told, stored_name
from .boxes import Box, Region
from .crc import Chunks
from .errors import CheckpointError, shown
from .extra_state import refuse_elsewhere
from .format import CLIENT, FAMILIES, MODEL, MOST_CHUNKS, OPTIMIZER, Placed, TensorSpec
from .plan import FilePlan, bins, numbered_files, weight_map, worth_a_file
from .striping import striped_files
from .writers import KeySet, Spot, Writers, different_specs

__all__ = ["Part", "PlannedRow", "WritePlan", "merged_numbers"]


class Part(NamedTuple):
    """A piece of a rank as the plan sees it.

    Attributes:
        writer: the rank that writes it.
        replicated: whether several ranks hold it.
    """

    family: str
    name: str
    spot: Spot
    writer: int
    replicated: bool


class PlannedRow(NamedTuple):
    """A region of a tensor that a rank holds, with the members of the family that it has of it."""

    name: str
    spot: Spot
    keys: KeySet
    replicated: bool


@dataclass(frozen=True)
class WritePlan:
    """The place of everything in the files. Only rank 0 has it.

    Attributes:
        files: the files, in order.
        placed: family -> name -> place.
        map_text: content of `model.safetensors.index.json`; empty where it is not needed.
        chunk_bytes: bytes of a tensor that are hashed together.
        model: names of parameters and buffers, in order.
        unlike, aliases, excluded: of all ranks together.
        steady: files that hold nothing but frozen parameters.
        striped: whether the files are those of a job on many hosts (`striping.py`).
    """

    told: Told
    files: tuple[FilePlan, ...]
    placed: Mapping[str, Mapping[str, Placed]]
    map_text: bytes
    chunk_bytes: int
    model: tuple[str, ...]
    unlike: frozenset[str]
    aliases: Mapping[str, tuple[str, ...]]
    excluded: tuple[str, ...]
    steady: frozenset[str]
    striped: bool
    _writers: Writers = field(repr=False)

    @staticmethod
    def make(told: Told, *, max_file_bytes: int, chunk_bytes: int, hosts: Sequence[int] | None = None) -> WritePlan:
        """Merge what the ranks told.

        Args:
            chunk_bytes: bytes of a tensor that are hashed together; doubled for a checkpoint of too many chunks.
            hosts: the host of each rank; None: one host.

        Raises:
            CheckpointError: ranks contradict each other, or something is held by no rank or by two; names tensor and
                ranks.
        """
        model = _merged_model(told)
        writers = Writers.of(told, model)
        specs = {MODEL: list(model.values()), OPTIMIZER: list(writers.states(model)), CLIENT: writers.client_specs}
        known = [known for catalogue in told.catalogues for known in catalogue.known.values()]
        refuse_elsewhere((k.spec.name for k in known), told.catalogues[told.of_rank[0][0]].known)
        nbytes = sum(spec.nbytes for family in (MODEL, OPTIMIZER) for spec in specs[family])
        while nbytes > MOST_CHUNKS * chunk_bytes:  # all hashes go to rank 0, and every load reads them
            chunk_bytes *= 2
        frozen = worth_a_file(model, frozenset(k.spec.name for k in known if k.frozen))
        plain = {family: bins(specs[family], max_file_bytes, frozen) for family in FAMILIES}
        striped = None
        if hosts is not None and max(hosts) > 0:
            striped = striped_files(plain, specs, writers.masks(specs), frozen, max_file_bytes, len(told.of_rank))
        files = [one for f in FAMILIES for one in numbered_files(f, plain[f])] if striped is None else striped
        placed: dict[str, dict[str, Placed]] = {family: {} for family in FAMILIES}
        family_of = {id(spec): placed[family] for family, members in specs.items() for spec in members}
        for plan in files:
            for one in plan.tensors:
                family_of[id(one.spec)][one.spec.name] = one
        writers.check(model)
        return WritePlan(
            told=told,
            files=tuple(files),
            placed=placed,
            map_text=weight_map(files),
            chunk_bytes=chunk_bytes,
            model=tuple(model),
            unlike=frozenset(k.spec.name for k in known if k.unlike),
            aliases=_merged_aliases(told, model),
            excluded=tuple(dict.fromkeys(name for catalogue in told.catalogues for name in catalogue.excluded)),
            steady=frozenset(plan.name for plan in files if {p.spec.name for p in plan.tensors} <= frozen),
            striped=striped is not None,
            _writers=writers,
        )

    @property
    def has_replicas(self) -> bool:
        """Whether several ranks hold one region."""
        return bool(self._writers.replicated)

    def rows(self, rank: int) -> Iterator[PlannedRow]:
        """A rank's parts of parameters and buffers, in the order in which it has them."""
        catalogue, number = self.told.of_rank[rank]
        names, holding, replicated = self.told.names[catalogue], self.told.holdings[number], self._writers.replicated
        boxes, key_sets = holding.boxes, holding.key_sets
        for tensor, box, start, stop, keys in holding.each_row():
            if start < stop:
                name, spot = names[tensor], (boxes[box], start, stop)
                yield PlannedRow(name, spot, key_sets[keys], (name, spot) in replicated)

    def clients(self, rank: int) -> list[str]:
        """Names of the tensors with elements that only this rank knows."""
        return [client.name for client in self.told.holdings[self.told.of_rank[rank][1]].client if client.spec.numel]

    def client_writer(self, name: str) -> int:
        """The rank that writes such a tensor."""
        return self._writers.client[name]

    def writer(self, row: PlannedRow, key: str) -> int:
        """The rank that writes a member of a row."""
        return self._writers.of_piece(row.name, key, row.spot)

    def parts(self, rank: int) -> Iterator[Part]:
        """The pieces of a rank, in the order in which it has them."""
        for row in self.rows(rank):
            for key, _ in row.keys:
                yield Part(*stored_name(key, row.name), row.spot, self.writer(row, key), row.replicated)
        for name in self.clients(rank):
            spot = (None, 0, self.placed[CLIENT][name].spec.numel)
            yield Part(CLIENT, name, spot, self.client_writer(name), False)

    @functools.cached_property
    def first_chunks(self) -> dict[tuple[str, str], int]:
        """The chunks of all tensors are numbered one tensor after the other: the number of each tensor's first."""
        found, number = {}, 0
        for family, members in self.placed.items():
            for name, placed in members.items():
                found[family, name] = number
                number += -(-placed.spec.nbytes // self.chunk_bytes)
        return found

    @functools.cached_property
    def chunk_count(self) -> int:
        """Chunks of all tensors."""
        last = next(reversed(self.first_chunks), None)
        return self.first_chunks[last] + len(self.chunks(*last)) if last is not None else 0

    @functools.cached_property
    def holders(self) -> dict[tuple[str, str, Spot], int]:
        """Pieces that several ranks hold, which must have the same values: the number, from 1 on, of the set of these
        ranks.
        """
        held_by: dict[tuple[str, str, Spot], int] = {}
        ranks_of = [0] * len(self.told.first)
        numbers = {kind: number for number, kind in enumerate(self.told.first)}
        for kind in self.told.of_rank:
            ranks_of[numbers[kind]] += 1
        for kind, rank in self.told.first.items() if self._writers.replicated else ():
            for part in self.parts(rank):
                if part.replicated and part.name not in self.unlike:
                    key = (part.family, part.name, part.spot)
                    held_by[key] = held_by.get(key, 0) | 1 << numbers[kind]
        sets: dict[int, int] = {}
        for mask in held_by.values():
            single = mask & (mask - 1) == 0 and ranks_of[mask.bit_length() - 1] == 1
            sets.setdefault(mask, 0 if single else len(sets) + 1)
        return {key: sets[mask] for key, mask in held_by.items()}

    def region(self, part: Part) -> Region:
        """The region of a piece."""
        box, start, stop = part.spot
        return Region(Box.whole(self.placed[part.family][part.name].spec.shape) if box is None else box, start, stop)

    def chunks(self, family: str, name: str, crcs: Sequence[int] = ()) -> Chunks:
        """The chunks in which a tensor is hashed."""
        return Chunks.grid(self.placed[family][name].spec.nbytes, self.chunk_bytes, crcs)


def _merged_model(told: Told) -> dict[str, TensorSpec]:
    """Parameters and buffers of all ranks, in the order in which the ranks know them."""
    merged: dict[str, TensorSpec] = {}
    origin: dict[str, int] = {}
    for number, catalogue in enumerate(told.catalogues):
        rank = next(rank for rank, (found, _) in enumerate(told.of_rank) if found == number)
        for name, known in catalogue.known.items():
            before = merged.setdefault(name, known.spec)
            if before != known.spec:
                raise different_specs(name, known.spec, rank, before, origin[name])
            origin.setdefault(name, rank)
    return merged


def _merged_aliases(told: Told, model: Mapping[str, TensorSpec]) -> dict[str, tuple[str, ...]]:
    merged: dict[str, dict[str, None]] = {}
    for catalogue in told.catalogues:
        for name, known in catalogue.known.items():
            if known.aliases is not None:
                merged.setdefault(name, {}).update(dict.fromkeys(known.aliases))
    return {name: tuple(merged[name]) for name in model if name in merged}


def merged_numbers(plan: WritePlan, numbers: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, dict[str, Any]]:
    """Optimizer states that are one number: state -> parameter -> value, from the values of each rank.

    Raises:
        CheckpointError: ranks have different values.
    """
    told = plan.told
    merged: dict[str, dict[str, tuple[Any, int]]] = {}
    seen: set[tuple[int, str, bytes, str]] = set()  # most ranks tell the same
    for rank, values_of in enumerate(numbers):
        catalogue, holding = told.of_rank[rank]
        for key, tensors in told.holdings[holding].numbered.items():
            told_before = (catalogue, key, tensors.tobytes(), repr(values_of[key]))
            if told_before in seen:
                continue
            seen.add(told_before)
            known = merged.setdefault(key, {})
            for tensor, value in zip(tensors, values_of[key]):
                name = told.names[catalogue][tensor]
                other_value, other = known.setdefault(name, (value, rank))
                if repr(other_value) != repr(value):  # repr: NaN is equal to itself here
                    raise CheckpointError(
                        f"optimizer state {shown(key)} of {shown(name)} is {value!r} on rank {rank} and "
                        f"{other_value!r} on rank {other}; a single value must be the same on all ranks"
                    )
    number = {name: i for i, name in enumerate(plan.model)}
    return {
        key: {name: merged[key][name][0] for name in sorted(merged[key], key=number.__getitem__)}
        for key in sorted(merged)
    }
