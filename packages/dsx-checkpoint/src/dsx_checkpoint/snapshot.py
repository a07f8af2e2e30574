"""Phase 1 of a save: the list of this rank's tensors. It writes nothing and does not communicate.

A snapshot names tensors in global coordinates: the name, shape and region that they have in the whole model. If
model parallelism gives a rank a part of the model (a slice of a tensor, a stage of a pipeline, an expert), `places`
says which part.

Pieces hold views of the tensors in use, so that taking a snapshot costs nothing; training must wait until they are
written. Values that are not in memory (`dsx_zero.StoredValues`) are read when their piece is written, and freed
afterwards. An asynchronous save replaces the pieces by copies (`Piece.fetch`), so that training can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .boxes import Box, Region
from .encode import encode
from .errors import CheckpointError, shown
from .format import CLIENT, MASTER, MODEL, OPTIMIZER, TensorSpec, dtype_name
from .plan import Announcement


@dataclass(frozen=True)
class Place:
    """Where a rank's tensor belongs: name and shape of the whole tensor, and the box of it that the rank has."""

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
    """All pieces of one rank, the announcement of them, and the encoded state (of which rank 0's is kept)."""

    pieces: list[Piece] = field(default_factory=list)
    announcement: Announcement = field(default_factory=Announcement)
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
        snapshot = Snapshot()
        for part in slices:
            snapshot._add_part(part, places, excluded=exclude_frozen and not part.trainable)
        for name, buffer in persistent_buffers(module):
            place = Place.of(name, buffer.shape, places)
            snapshot.announcement.unlike.add(place.name)
            snapshot._add(MODEL, place.name, place, 0, buffer.detach().reshape(-1))
        tensors: dict[str, torch.Tensor] = {}
        snapshot.state = encode(state, "state", tensors)
        if rank != 0:
            tensors = {}  # rank 0's are kept
        if rank_state is not None:
            snapshot.announcement.rank_state = encode(rank_state, f"rank{rank}", tensors)
        for name, tensor in tensors.items():
            place = Place(name, tuple(tensor.shape), Box.whole(tensor.shape))
            snapshot._add(CLIENT, name, place, 0, tensor.reshape(-1))
        return snapshot

    def _add_part(self, part: Any, places: Mapping[str, Place], *, excluded: bool) -> None:
        place, announced = Place.of(part.name, part.shape, places), self.announcement
        if excluded:
            announced.excluded.append(place.name)
            return
        if not part.trainable:
            announced.frozen.add(place.name)
        announced.aliases[place.name] = tuple(places[a].name if a in places else a for a in part.aliases)
        self._add(MODEL, place.name, place, part.start, part.param)
        if part.master is not None and part.master.dtype != part.param.dtype:
            self._add(OPTIMIZER, f"{MASTER}/{place.name}", place, part.start, part.master)
        for key, value in part.states.items():
            self._add_state(key, value, part, place)
        for key, start, values in part.ranges:
            self._add(OPTIMIZER, f"{_checked_key(key)}/{place.name}", place, start, values)

    def _add_state(self, key: str, value: Any, part: Any, place: Place) -> None:
        _checked_key(key)
        if not isinstance(value, torch.Tensor) and hasattr(value, "fetch"):
            self._add(OPTIMIZER, f"{key}/{place.name}", place, part.start, value)
        elif not isinstance(value, torch.Tensor) or value.dim() == 0:
            number = value.item() if isinstance(value, torch.Tensor) else value
            self.announcement.scalars.setdefault(key, {})[place.name] = number
        elif value.numel() == part.stop - part.start:
            self._add(OPTIMIZER, f"{key}/{place.name}", place, part.start, value)
        else:
            raise CheckpointError(
                f"optimizer state {shown(key)} of {shown(part.name)} has {value.numel()} elements for a slice of "
                f"{part.stop - part.start}; expected one number or one element per parameter element"
            )

    def _add(self, family: str, name: str, place: Place, start: int, values: Any) -> None:
        """Take in elements `[start, start + numel)` of the rank's tensor; no elements only announce that it exists."""
        spec = TensorSpec(name, dtype_name(values.dtype), place.shape)
        _, regions = self.announcement.tensors[family].setdefault(name, (spec, []))
        if values.numel():
            region = Region(place.box, start, start + values.numel())
            if region in regions:
                raise CheckpointError(f"{shown(name)} is listed twice; each tensor of the whole model has one name")
            regions.append(region)
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
