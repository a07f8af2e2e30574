"""The writer of each region: of ranks that hold the same region, the lowest.

The regions of a tensor and of its states are mostly the same, so they are kept once per set of members that ranks hold
together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .announcing import MODEL_KEY, Holding, Told, stored_name
from .boxes import Box, Region, why_not_a_tiling
from .errors import CheckpointError, shown
from .format import CLIENT, MASTER, MODEL, TensorSpec

__all__ = ["KeySet", "Spot", "Writers", "different_specs"]

Spot = tuple[Box | None, int, int]
"""A region of a tensor: elements of a box; the box None is the whole tensor."""
KeySet = tuple[tuple[str, str], ...]


@dataclass
class Writers:
    """The writers of all regions.

    Attributes:
        by_tensor: tensor -> members that are held together -> region -> rank.
        dtypes: tensor -> state -> dtype, and the lowest rank that has it.
        replicated: regions of tensors that several ranks hold.
        shapes: tensor -> state -> its shape, where that is not the tensor's.
        client, client_specs: tensors that one rank alone knows: who writes them, and what they are.
    """

    by_tensor: dict[str, dict[KeySet, dict[Spot, int]]] = field(default_factory=dict)
    dtypes: dict[str, dict[str, tuple[str, int]]] = field(default_factory=dict)
    replicated: set[tuple[str, Spot]] = field(default_factory=set)
    shapes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    client: dict[str, int] = field(default_factory=dict)
    client_specs: list[TensorSpec] = field(default_factory=list)

    @staticmethod
    def of(told: Told, model: Mapping[str, TensorSpec]) -> Writers:
        """From what the ranks hold. Raises `CheckpointError` where they have states of different dtypes."""
        made = Writers()
        members: dict[tuple[int, int], int] = {}
        for kind in told.of_rank:
            members[kind] = members.get(kind, 0) + 1
        for catalogue in told.catalogues:
            for name, known in catalogue.known.items():
                if known.master:
                    made._note_dtype(name, model[name], MASTER, known.master, 0)
        for (catalogue, number), rank in told.first.items():
            if told.holdings[number].shaped:
                made._take_shapes(rank, told.names[catalogue], told.holdings[number])
            made._take_rows(rank, told.names[catalogue], told.holdings[number], model, members[catalogue, number] > 1)
            for client in told.holdings[number].client:
                if client.name not in made.client:
                    made.client[client.name] = rank
                    made.client_specs.append(client.spec)
        return made

    def _take_shapes(self, rank: int, names: Sequence[str], holding: Holding) -> None:
        for (key, shape), tensors in holding.shaped.items():
            for tensor in tensors:
                known = self.shapes.setdefault(names[tensor], {}).setdefault(key, shape)
                if known != shape:
                    raise CheckpointError(
                        f"optimizer state {shown(key)} of {shown(names[tensor])} has the shape {shape} on rank {rank}"
                        f" and {known} on a lower rank; all ranks must hold one model"
                    )

    def _take_rows(
        self, rank: int, names: Sequence[str], holding: Holding, model: Mapping[str, TensorSpec], several: bool
    ) -> None:
        boxes, key_sets, by_tensor, numbers = holding.boxes, holding.key_sets, self.by_tensor, iter(holding.rows)
        for tensor, box, start, stop, number in zip(*[numbers] * 5):  # `each_row` would take half of the time
            name, keys, spot = names[tensor], key_sets[number], (boxes[box], start, stop)
            sets = by_tensor.get(name)
            if sets is None:
                sets = by_tensor[name] = {}
            found = sets.get(keys)
            if found is None:
                found = sets[keys] = {}
                for key, dtype in keys:
                    if key != MODEL_KEY:
                        self._note_dtype(name, model[name], key, dtype, rank)
            if found.setdefault(spot, rank) != rank or several or len(sets) > 1:
                self.replicated.add((name, spot))

    def _note_dtype(self, name: str, spec: TensorSpec, key: str, dtype: str, rank: int) -> None:
        known, other = self.dtypes.setdefault(name, {}).setdefault(key, (dtype, rank))
        if known != dtype:
            stored = stored_name(key, name)[1]
            one, before = (TensorSpec(stored, found, spec.shape) for found in (dtype, known))
            raise different_specs(stored, one, rank, before, other)

    def states(self, model: Mapping[str, TensorSpec]) -> Iterator[TensorSpec]:
        """Masters and states, sorted by parameter, masters first: the same order whichever ranks hold what."""
        order: dict[tuple[str, ...], list[str]] = {}
        for name, spec in model.items():
            found = self.dtypes.get(name, {})
            keys = order.get(tuple(found))
            if keys is None:
                keys = order[tuple(found)] = sorted(found, key=lambda key: (key != MASTER, key))
            for key in keys:
                yield TensorSpec(stored_name(key, name)[1], found[key][0], self._shape(spec, key))

    def _shape(self, spec: TensorSpec, key: str) -> tuple[int, ...]:
        """The shape of a member of a tensor's family."""
        own = self.shapes.get(spec.name) if self.shapes else None
        return spec.shape if own is None else own.get(key, spec.shape)

    def of_piece(self, name: str, key: str, spot: Spot) -> int:
        """The rank that writes a region of a tensor (`MODEL_KEY`) or of one of its states."""
        sets = self.by_tensor[name]
        if len(sets) == 1:
            return next(iter(sets.values()))[spot]
        return min(regions[spot] for keys, regions in sets.items() if spot in regions and key in _keys_of(keys))

    def check(self, model: Mapping[str, TensorSpec]) -> None:
        """Raise `CheckpointError` unless the regions of each tensor and each state are the whole of it, once."""
        for of_model in (True, False):
            for name, spec in model.items():
                sets, good = self.by_tensor.get(name, {}), set()
                if not of_model and len(sets) == 1:
                    held = _keys_of(next(iter(sets)))
                    if MODEL_KEY in held and self.dtypes.get(name, {}).keys() <= held:
                        continue  # its states have the same regions as the tensor itself, which is the whole
                for key in [MODEL_KEY] if of_model else self.dtypes.get(name, ()):
                    found = [regions for keys, regions in sets.items() if key in _keys_of(keys)]
                    if tuple(map(id, found)) not in good:
                        _check_whole(stored_name(key, name)[1], self._shape(spec, key), found)
                        good.add(tuple(map(id, found)))

    def masks(self, specs: Mapping[str, Sequence[TensorSpec]]) -> dict[int, int]:
        """The ranks that write a tensor, as the bits of a number; by the `id` of its spec."""
        same: dict[int, int] = {}
        of_tensor: dict[str, int] = {}  # of those whose members are all held together
        found: dict[int, int] = {}
        for family, members in specs.items():
            for spec in members:
                key, _, name = (MODEL_KEY, "", spec.name) if family in (MODEL, CLIENT) else spec.name.partition("/")
                if family == CLIENT:
                    found[id(spec)] = 1 << self.client[name]
                    continue
                mask = of_tensor.get(name)
                if mask is None:
                    sets = self.by_tensor.get(name, {})
                    parts = [regions for keys, regions in sets.items() if key in _keys_of(keys)]
                    mask = _mask(parts)
                    mask = same.setdefault(mask, mask)
                    if len(sets) == len(parts) == 1 and self.dtypes.get(name, {}).keys() <= _keys_of(next(iter(sets))):
                        of_tensor[name] = mask
                found[id(spec)] = mask
        return found


def _mask(parts: Sequence[Mapping[Spot, int]]) -> int:
    ranks = {rank for regions in parts for rank in regions.values()}
    first = min(ranks, default=0)
    if ranks and max(ranks) - first + 1 == len(ranks):
        return (1 << len(ranks)) - 1 << first
    mask = 0
    for rank in ranks:
        mask |= 1 << rank
    return mask


@functools.lru_cache(maxsize=1024)
def _keys_of(keys: KeySet) -> frozenset[str]:
    return frozenset(key for key, _ in keys)


def _in_order(numel: int, spots: Iterable[Spot]) -> bool:
    """Whether these are all of a tensor of so many elements, one after the other."""
    position = 0
    for box, start, stop in spots:
        if box is not None or start != position:
            return False
        position = stop
    return position == numel


def _check_whole(name: str, shape: tuple[int, ...], found: Sequence[Mapping[Spot, int]]) -> None:
    if len(found) == 1 and _in_order(math.prod(shape), found[0]):
        return  # as ZeRO cuts
    spots: dict[Spot, int] = {}
    for regions in found:
        for spot, rank in regions.items():
            spots[spot] = min(rank, spots.get(spot, rank))
    position, numel = 0, math.prod(shape)
    if all(box is None for box, *_ in spots):
        for _, start, stop in sorted(spot for spot in spots if spot[1] < spot[2]):
            if start != position:
                break
            position = stop
        else:
            if position == numel:
                return
    whole = Box.whole(shape)
    wrong = why_not_a_tiling(shape, [Region(whole if box is None else box, *ends) for box, *ends in spots])
    if wrong:
        ranks = sorted(set(spots.values()))[:10]
        raise CheckpointError(
            f"what ranks {ranks} hold of {shown(name)} (shape {shape}) is not the whole tensor, once: "
            f"{wrong}; if they hold parts of it by model parallelism, say so with `places`"
        )


def different_specs(name: str, spec: TensorSpec, rank: int, known: TensorSpec, other: int) -> CheckpointError:
    """The error for a tensor that is another one on two ranks."""
    return CheckpointError(
        f"{shown(name)} is {spec.dtype} of shape {spec.shape} on rank {rank}, but {known.dtype} of shape "
        f"{known.shape} on rank {other}; all ranks must hold one model"
    )
