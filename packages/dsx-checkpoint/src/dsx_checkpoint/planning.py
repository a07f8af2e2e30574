"""Phase 2 of a save: the place of each tensor's bytes, and the rank that writes them.

Rank 0 alone makes the plan, from what the ranks have told (`announcing.py`), and gives each rank its part of it
(`shares.py`). Ranks that told the same count as one kind, so that the work grows with what is different. The plan of
the last saves is kept: a save of the same tensors in the same layout plans nothing.

Replicas (bytes that several ranks hold) are written by the lowest of these ranks; the others only hash theirs.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .announcing import Told, stored_name
from .boxes import Box, Region
from .crc import Chunks
from .errors import CheckpointError, shown
from .format import CLIENT, FAMILIES, MODEL, OPTIMIZER, Placed, TensorSpec
from .plan import FilePlan, plan_files, weight_map, worth_a_file
from .striping import striped_files
from .writers import Spot, Writers, different_specs

__all__ = ["Part", "WritePlan", "merged_numbers"]


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


@dataclass(frozen=True)
class WritePlan:
    """Where everything goes. Only rank 0 has it.

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
    _tables: dict[int, tuple[array[int], bytes]] = field(default_factory=dict, repr=False)

    @staticmethod
    def make(told: Told, *, max_file_bytes: int, chunk_bytes: int, hosts: Sequence[int] | None = None) -> WritePlan:
        """Merge what the ranks told.

        Args:
            hosts: the host of each rank; None: one host.

        Raises:
            CheckpointError: ranks contradict each other, or something is held by no rank or by two; names tensor and
                ranks.
        """
        model = _merged_model(told)
        writers = Writers.of(told, model)
        specs = {MODEL: list(model.values()), OPTIMIZER: list(writers.states(model)), CLIENT: writers.client_specs}
        known = [known for catalogue in told.catalogues for known in catalogue.known.values()]
        frozen = worth_a_file(model, frozenset(k.spec.name for k in known if k.frozen))
        files = [plan for f in FAMILIES for plan in plan_files(f, specs[f], max_file_bytes, frozen)]
        striped = None
        if hosts is not None and max(hosts) > 0:
            striped = striped_files(files, specs, writers.masks(specs), frozen, max_file_bytes, len(told.of_rank))
        files = files if striped is None else striped
        family_of = {id(spec): family for family, members in specs.items() for spec in members}
        placed: dict[str, dict[str, Placed]] = {family: {} for family in FAMILIES}
        for plan in files:
            for one in plan.tensors:
                placed[family_of[id(one.spec)]][one.spec.name] = one
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

    def parts(self, rank: int) -> Iterator[Part]:
        """The pieces of a rank, in the order in which it has them."""
        catalogue, number = self.told.of_rank[rank]
        names, holding, writers = self.told.names[catalogue], self.told.holdings[number], self._writers
        for row in holding.each_row():
            if row.start < row.stop:
                name, spot = names[row.tensor], (holding.boxes[row.box], row.start, row.stop)
                replicated = (name, spot) in writers.replicated
                for key, _ in holding.key_sets[row.keys]:
                    yield Part(*stored_name(key, name), spot, writers.of_piece(name, key, spot), replicated)
        for client in holding.client:
            if client.spec.numel:
                yield Part(CLIENT, client.name, (None, 0, client.spec.numel), writers.client[client.name], False)

    @functools.cached_property
    def first_chunks(self) -> dict[tuple[str, str], int]:
        """The chunks of all tensors are numbered one tensor after the other: the number of each tensor's first."""
        found, total = {}, 0
        for family, members in self.placed.items():
            for name in members:
                found[family, name] = total
                total += len(self.chunks(family, name))
        return found

    @functools.cached_property
    def chunk_count(self) -> int:
        """Chunks of all tensors."""
        return sum(len(self.chunks(*key)) for key in self.first_chunks)

    def table(self, rank: int) -> tuple[array[int], bytes]:
        """Of each piece of a rank: the number of its tensor's first chunk, and 1 if the rank writes it, plus 2 if
        several ranks hold it. It is kept, because each save of the plan needs it.
        """
        known = self._tables.get(rank)
        if known is None:
            firsts, flags = array("q"), bytearray()
            for part in self.parts(rank):
                firsts.append(self.first_chunks[part.family, part.name])
                flags.append((part.writer == rank) + 2 * part.replicated)
            known = self._tables[rank] = (firsts, bytes(flags))
        return known

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
