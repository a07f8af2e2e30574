"""Phase 1 of a save: the list of this rank's tensors. It writes nothing and does not communicate.

A snapshot names tensors in global coordinates: the name, shape and region that they have in the whole model. If
model parallelism gives a rank a part of the model (a slice of a tensor, a stage of a pipeline, an expert), `places`
says which part.

Pieces hold views of the tensors in use, so that taking a snapshot costs nothing; training must wait until they are
written. Values that are not in memory (`dsx_zero.state.slices.StoredValues`) are read when their piece is written, and
freed afterwards. An asynchronous save replaces the pieces by copies (`Piece.fetch`), so that training can go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .announcing import MODEL_KEY, Catalogue, ClientTensor, Holding, HoldingBuilder, Known, stored_name
from .boxes import Box, Region
from .encode import encode
from .errors import CheckpointError, shown
from .extra_state import EXTRA_KEY, EXTRA_SHAPE, extra_states
from .format import CLIENT, MASTER, TensorSpec, dtype_name


@dataclass(frozen=True)
class Place:
    """Place of a rank's tensor in the model: name and shape of the whole tensor, and the box that the rank has."""

    name: str
    shape: tuple[int, ...]
    box: Box

    @staticmethod
    def of(name: str, shape: Sequence[int], places: Mapping[str, Place]) -> Place:
        """The place of a tensor of this name and shape: what `places` says, else the whole tensor under its own name.

        Raises:
            CheckpointError: the box does not have the tensor's shape, or does not lie in the whole.
        """
        found = places.get(name)
        if found is None:
            return Place(name, tuple(shape), Box.whole(shape))
        if found.box.size != tuple(shape) or not found.box.lies_in(found.shape):
            raise CheckpointError(
                f"places[{shown(name)}]: got the box at {found.box.offset} of size {found.box.size} in shape "
                f"{found.shape}, expected one of size {tuple(shape)}, which is the shape of the tensor"
            )
        return found

    def spec(self, dtype: str) -> TensorSpec:
        """The whole tensor."""
        return TensorSpec(self.name, dtype, self.shape)


@dataclass(frozen=True)
class Piece:
    """A region of a tensor that this rank holds.

    Attributes:
        fetch: gives the values, 1-D, on any device.
        in_memory: whether the values are there before and after `fetch`. Where they are not, `fetch` reads them, and
            they are let go before the next piece is fetched.
        parts: of values that are not in memory, gives them in order, at most so many elements at a time.
    """

    family: str
    spec: TensorSpec
    region: Region
    fetch: Callable[[], torch.Tensor]
    parts: Callable[[int], Iterator[torch.Tensor]] | None = None
    in_memory: bool = True


@dataclass
class Snapshot:
    """All pieces of one rank, and what the rank tells of them.

    Attributes:
        pieces: in the order of the holding.
        catalogue, holding: the tensors that the rank knows, and the regions that it holds.
        numbers: optimizer states that are one number: their values, in the order of `holding.numbered`.
        rank_state: encoded: what this rank alone knows; None: nothing.
        state: encoded; rank 0's is kept.
    """

    pieces: list[Piece] = field(default_factory=list)
    catalogue: Catalogue = field(default_factory=Catalogue)
    holding: Holding = field(default_factory=Holding)
    numbers: dict[str, list[Any]] = field(default_factory=dict)
    rank_state: Any = None
    state: Any = None

    @staticmethod
    def take(
        module: nn.Module,
        slices: Iterable[Any],
        state: dict[str, Any],
        *,
        rank: int,
        places: Mapping[str, Place],
        exclude_frozen: bool,
        rank_state: dict[str, Any] | None = None,
    ) -> Snapshot:
        """See `writing.save`. Raises `CheckpointError` for what cannot be saved."""
        snapshot, builder = Snapshot(), HoldingBuilder()
        snapshot.catalogue, snapshot.holding = builder.catalogue, builder.holding
        for part in slices:
            snapshot._add_part(builder, part, places, excluded=exclude_frozen and not part.trainable)
        for name, buffer in persistent_buffers(module):
            place = Place.of(name, buffer.shape, places)
            builder.know(place.name, Known(place.spec(dtype_name(buffer.dtype)), unlike=True))
            snapshot._add(builder, MODEL_KEY, place, 0, buffer.detach().reshape(-1))
        extra = extra_states(module)
        for name in extra:
            place, nothing = Place.of(name, EXTRA_SHAPE, {}), torch.empty(EXTRA_SHAPE, dtype=torch.uint8, device="cpu")
            builder.know(name, Known(place.spec(dtype_name(nothing.dtype)), unlike=True))
            snapshot._add(builder, MODEL_KEY, place, 0, nothing)
        builder.finish()
        tensors: dict[str, torch.Tensor] = {}
        snapshot.state = encode({**state, EXTRA_KEY: extra} if extra else state, "state", tensors)
        if rank != 0:
            tensors = {}  # rank 0's are kept
        if rank_state is not None:
            snapshot.rank_state = encode(rank_state, f"rank{rank}", tensors)
        for name, tensor in tensors.items():
            snapshot._add_client(ClientTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape)), tensor.reshape(-1))
        return snapshot

    def _add_part(self, builder: HoldingBuilder, part: Any, places: Mapping[str, Place], *, excluded: bool) -> None:
        place = Place.of(part.name, part.shape, places)
        if excluded:
            self.catalogue.excluded.append(place.name)
            return
        master = part.master if part.master is not None and part.master.dtype != part.param.dtype else None
        known = Known(
            place.spec(dtype_name(part.param.dtype)),
            master="" if master is None else dtype_name(master.dtype),
            frozen=not part.trainable,
            aliases=tuple(places[a].name if a in places else a for a in part.aliases),
        )
        builder.know(place.name, known)
        self._add(builder, MODEL_KEY, place, part.start, part.param)
        if master is not None:
            self._add(builder, MASTER, place, part.start, master)
        for key, value in part.states.items():
            self._add_state(builder, key, value, part, place)
        for key, start, values in part.ranges:
            self._add(builder, _checked_key(key), place, start, values)
        for state in getattr(part, "shaped", ()):
            self._add_shaped(builder, state, part, place)

    def _add_shaped(self, builder: HoldingBuilder, state: Any, part: Any, place: Place) -> None:
        """Take in elements of a state with a shape of its own."""
        key, shape, count = _checked_key(state.key), tuple(state.shape), state.values.numel()
        if place.box != Box.whole(place.shape) and not state.joins_slices:
            raise CheckpointError(
                f"optimizer state {shown(key)} of {shown(part.name)} has the shape {shape}, and this rank has a part of"
                f" the tensor of shape {place.shape} by model parallelism: its values belong to blocks of this part,"
                " which another slicing does not have, so that they cannot be joined; use an optimizer with one value"
                " per element (AdamW), or save with optimizer_states=False"
            )
        if count:
            region, dtype = Region(Box.whole(shape), state.start, state.start + count), dtype_name(state.values.dtype)
            builder.hold(place.name, key, dtype, region)
            builder.shape(place.name, key, shape)
            family, name = stored_name(key, place.name)
            self._add_piece(family, TensorSpec(name, dtype, shape), region, state.values)

    def _add_state(self, builder: HoldingBuilder, key: str, value: Any, part: Any, place: Place) -> None:
        _checked_key(key)
        if not isinstance(value, torch.Tensor) and hasattr(value, "fetch"):
            self._add(builder, key, place, part.start, value)
        elif not isinstance(value, torch.Tensor) or value.dim() == 0:
            self.numbers.setdefault(key, []).append(value.item() if isinstance(value, torch.Tensor) else value)
            builder.number(place.name, key)
        elif value.numel() == part.stop - part.start:
            self._add(builder, key, place, part.start, value)
        else:
            raise CheckpointError(
                f"optimizer state {shown(key)} of {shown(part.name)} has {value.numel()} elements for a slice of "
                f"{part.stop - part.start}; expected one number or one element per parameter element"
            )

    def _add(self, builder: HoldingBuilder, key: str, place: Place, start: int, values: Any) -> None:
        """Take in elements `[start, start + numel)` of the rank's tensor. None tell nothing, unless it has none."""
        count = values.numel()
        if not count and math.prod(place.shape):
            return
        region, dtype = Region(place.box, start, start + count), dtype_name(values.dtype)
        builder.hold(place.name, key, dtype, region)
        if count:
            family, name = stored_name(key, place.name)
            self._add_piece(family, TensorSpec(name, dtype, place.shape), region, values)

    def _add_client(self, client: ClientTensor, values: torch.Tensor) -> None:
        self.holding.client.append(client)
        if values.numel():
            self._add_piece(CLIENT, client.spec, Region.whole(client.shape), values)

    def _add_piece(self, family: str, spec: TensorSpec, region: Region, values: Any) -> None:
        if isinstance(values, torch.Tensor):
            self.pieces.append(Piece(family, spec, region, lambda: values))
        else:
            self.pieces.append(Piece(family, spec, region, values.fetch, values.parts, in_memory=False))


def _checked_key(key: str) -> str:
    if not key or "/" in key or key == MASTER:
        raise CheckpointError(
            f"got an optimizer state of the name {shown(key)}, which no checkpoint can hold; rename it"
        )
    return key


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each buffer that belongs to the state_dict, shared ones once."""
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer
