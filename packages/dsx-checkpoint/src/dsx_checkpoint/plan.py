"""Phase 2 of a save: the place of each tensor's bytes, and the rank that writes them. Pure arithmetic over the
announcements of the ranks.

All ranks compute the same plan from the same announcements, so that no rank has to be told what to write. Files are
filled up to a size limit; inside a file tensors are back to back (safetensors allows no holes), wide dtypes first, so
that each element is aligned. Replicas (bytes that several ranks hold) are written by the lowest of these ranks; the
others only hash theirs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .boxes import Region, why_not_a_tiling
from .crc import Chunks
from .errors import CheckpointError, shown
from .format import FAMILIES, MASTER, MODEL, OPTIMIZER, Placed, TensorSpec

MAX_FILE_BYTES = 5 * 10**9
STEADY_BYTES = 16 << 20  # frozen parameters of fewer bytes get no file of their own


# - Files


@dataclass(frozen=True)
class FilePlan:
    """One safetensors file: its header and the tensors behind it."""

    name: str
    header: bytes
    tensors: tuple[Placed, ...]
    size: int


def plan_files(
    stem: str, specs: Sequence[TensorSpec], max_bytes: int = MAX_FILE_BYTES, steady: Collection[str] = ()
) -> tuple[FilePlan, ...]:
    """Distribute `specs` over files `<stem>.safetensors` or `<stem>-0000i-of-0000n.safetensors`.

    A tensor larger than `max_bytes` gets a file of its own. No tensors, no file. Tensors named in `steady` come first
    and share no file with others.
    """
    bins: list[list[TensorSpec]] = []
    used, before = 0, False
    for spec in sorted(specs, key=lambda spec: spec.name not in steady):  # stable
        begins, before = before and spec.name not in steady, spec.name in steady
        if not bins or begins or (used + spec.nbytes > max_bytes and bins[-1]):
            bins.append([])
            used = 0
        bins[-1].append(spec)
        used += spec.nbytes
    if len(bins) == 1:
        return (plan_file(f"{stem}.safetensors", bins[0]),)
    return tuple(plan_file(f"{stem}-{i + 1:05d}-of-{len(bins):05d}.safetensors", b) for i, b in enumerate(bins))


def plan_file(name: str, specs: Sequence[TensorSpec]) -> FilePlan:
    """One file with these tensors, wide dtypes first, else in the given order."""
    ordered = sorted(specs, key=lambda s: -s.itemsize)  # stable: definition order within a width
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    offsets = []
    for spec in ordered:
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        offsets.append(position)
        position += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    header = len(text).to_bytes(8, "little") + text
    placed = tuple(Placed(s, name, len(header) + o) for s, o in zip(ordered, offsets))
    return FilePlan(name, header, placed, len(header) + position)


def weight_map(files: Iterable[FilePlan]) -> bytes:
    """The index that Hugging Face reads where weights are split over files; empty where there is one file."""
    model = [plan for plan in files if plan.name.startswith(f"{MODEL}-")]
    tensors = [placed for plan in model for placed in plan.tensors]
    total = sum(placed.spec.nbytes for placed in tensors)
    content = {"metadata": {"total_size": total}, "weight_map": {p.spec.name: p.file for p in tensors}}
    return json.dumps(content, indent=1).encode() if model else b""


# - Ranks

PieceKey = tuple[str, str, Region]
"""Family, name, and region of the tensor."""


@dataclass
class Announcement:
    """The list of one rank's tensors, without the values: it is sent to all ranks.

    Attributes:
        tensors: family -> name -> the tensor and this rank's regions of it (none: it only says that the tensor exists).
        unlike: names of model tensors whose replicas may differ, because each rank computes its own (running
            statistics).
        scalars: optimizer states that are one number: state -> parameter -> value.
        aliases: parameter -> its other names.
        excluded: parameters that are left out.
        rank_state: encoded: what this rank alone knows; None: nothing.
        frozen: parameters that are not trained.
    """

    tensors: dict[str, dict[str, tuple[TensorSpec, list[Region]]]] = field(
        default_factory=lambda: {family: {} for family in FAMILIES}
    )
    unlike: set[str] = field(default_factory=set)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    excluded: list[str] = field(default_factory=list)
    rank_state: Any = None
    frozen: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class WritePlan:
    """Where everything goes.

    Attributes:
        files: the files, in order.
        placed: family -> name -> place.
        writers: family -> name -> region -> the rank that writes it.
        map_text: content of `model.safetensors.index.json`; empty where it is not needed.
        chunk_bytes: bytes of a tensor that are hashed together.
        unlike, scalars, aliases, excluded: of all ranks together.
        rank_states: of each rank; empty where no rank has one.
        steady: files that hold nothing but frozen parameters.
    """

    files: tuple[FilePlan, ...]
    placed: Mapping[str, Mapping[str, Placed]]
    writers: Mapping[str, Mapping[str, Mapping[Region, int]]]
    map_text: bytes
    chunk_bytes: int
    unlike: frozenset[str]
    scalars: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, tuple[str, ...]]
    excluded: tuple[str, ...]
    rank_states: tuple[Any, ...]
    steady: frozenset[str]

    @staticmethod
    def make(announcements: Sequence[Announcement], *, max_file_bytes: int, chunk_bytes: int) -> WritePlan:
        """Merge what the ranks announced.

        Raises:
            CheckpointError: ranks contradict each other, or something is held by no rank or by two; names tensor and
                ranks.
        """
        specs = {family: _merge_specs(family, announcements) for family in FAMILIES}
        specs[OPTIMIZER] = _in_parameter_order(specs[OPTIMIZER], specs[MODEL])
        frozen = _worth_a_file(specs[MODEL], frozenset().union(*(a.frozen for a in announcements)))
        files = [plan for f in FAMILIES for plan in plan_files(f, list(specs[f].values()), max_file_bytes, frozen)]
        return WritePlan(
            files=tuple(files),
            placed={
                family: {p.spec.name: p for plan in files if plan.name.startswith(family) for p in plan.tensors}
                for family in FAMILIES
            },
            writers={family: _assign(specs[family], family, announcements) for family in FAMILIES},
            map_text=weight_map(files),
            chunk_bytes=chunk_bytes,
            unlike=frozenset(name for a in announcements for name in a.unlike),
            scalars=_merge_scalars(announcements, list(specs[MODEL])),
            aliases=_merge_aliases(announcements, list(specs[MODEL])),
            excluded=tuple(dict.fromkeys(name for a in announcements for name in a.excluded)),
            rank_states=(
                tuple(a.rank_state for a in announcements)
                if any(a.rank_state is not None for a in announcements)
                else ()
            ),
            steady=frozenset(plan.name for plan in files if {p.spec.name for p in plan.tensors} <= frozen),
        )

    def writes(self, rank: int) -> Callable[[PieceKey], bool]:
        """Whether a rank writes a piece; of replicas the lowest rank does."""
        return lambda key: self.writers[key[0]][key[1]][key[2]] == rank

    def chunks(self, family: str, name: str, crcs: Sequence[int] = ()) -> Chunks:
        """The chunks in which a tensor is hashed."""
        return Chunks.grid(self.placed[family][name].spec.nbytes, self.chunk_bytes, crcs)


def _merge_specs(family: str, announcements: Sequence[Announcement]) -> dict[str, TensorSpec]:
    merged: dict[str, TensorSpec] = {}
    origin: dict[str, int] = {}
    for rank, announced in enumerate(announcements):
        for name, (spec, _) in announced.tensors[family].items():
            known = merged.setdefault(name, spec)
            if known != spec:
                raise CheckpointError(
                    f"{shown(name)} is {spec.dtype} of shape {spec.shape} on rank {rank}, but {known.dtype} of shape "
                    f"{known.shape} on rank {origin[name]}; all ranks must hold one model"
                )
            origin.setdefault(name, rank)
    return merged


def _worth_a_file(specs: Mapping[str, TensorSpec], frozen: frozenset[str]) -> frozenset[str]:
    """Frozen parameters, if they are large enough that linking their files saves anything."""
    return frozen if sum(specs[name].nbytes for name in frozen if name in specs) >= STEADY_BYTES else frozenset()


def _in_parameter_order(states: dict[str, TensorSpec], model: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Sorted by parameter, masters first: the same order whichever ranks hold what."""
    number = {name: i for i, name in enumerate(model)}

    def key(name: str) -> tuple[float, str, bool, str]:
        state, _, parameter = name.partition("/")
        return number.get(parameter, math.inf), parameter, state != MASTER, state

    return {name: states[name] for name in sorted(states, key=key)}


def _assign(
    specs: Mapping[str, TensorSpec], family: str, announcements: Sequence[Announcement]
) -> dict[str, dict[Region, int]]:
    writers: dict[str, dict[Region, int]] = {name: {} for name in specs}
    for rank, announced in enumerate(announcements):
        for name, (_, regions) in announced.tensors[family].items():
            for region in regions:
                writers[name].setdefault(region, rank)
    for name, spec in specs.items():
        wrong = why_not_a_tiling(spec.shape, writers[name])
        if wrong:
            ranks = sorted(set(writers[name].values()))[:10]
            raise CheckpointError(
                f"what ranks {ranks} hold of {shown(name)} (shape {spec.shape}) is not the whole tensor, once: "
                f"{wrong}; if they hold parts of it by model parallelism, say so with `places`"
            )
    return writers


def _merge_scalars(announcements: Sequence[Announcement], order: list[str]) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, tuple[Any, int]]] = {}
    for rank, announced in enumerate(announcements):
        for key, values in announced.scalars.items():
            for name, value in values.items():
                known, other = merged.setdefault(key, {}).setdefault(name, (value, rank))
                if repr(known) != repr(value):  # repr: NaN is equal to itself here
                    raise CheckpointError(
                        f"optimizer state {shown(key)} of {shown(name)} is {value!r} on rank {rank} and {known!r} on "
                        f"rank {other}; a single value must be the same on all ranks"
                    )
    return {key: {name: merged[key][name][0] for name in order if name in merged[key]} for key in sorted(merged)}


def _merge_aliases(announcements: Sequence[Announcement], order: list[str]) -> dict[str, tuple[str, ...]]:
    merged: dict[str, dict[str, None]] = {}
    for announced in announcements:
        for name, others in announced.aliases.items():
            merged.setdefault(name, {}).update(dict.fromkeys(others))
    return {name: tuple(merged[name]) for name in order if name in merged}
