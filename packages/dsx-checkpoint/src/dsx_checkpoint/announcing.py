"""A rank's announcement before a save, without values: the tensors that it knows, and the regions that it holds.

The tensors that a rank knows (`Catalogue`) are equal on all ranks that hold a part of the same tensors. So ranks
compare a hash, and one rank of each kind sends them. What it holds (`Holding`) is small: with ZeRO a rank has elements
of one or two tensors of each unit. A hash of it says whether the plan of the last save still holds.

A row of a holding is a region and the family members that have it: the parameter itself, its master, its states.
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import columns
from .boxes import Box, Region
from .errors import CheckpointError, shown
from .format import CLIENT, MODEL, OPTIMIZER, TensorSpec

__all__ = ["MODEL_KEY", "Catalogue", "ClientTensor", "Holding", "Known", "PieceKey", "Row", "Told"]

PieceKey = tuple[str, str, Region]
"""Family, name, and region of the tensor."""

MODEL_KEY = ""
"""The key of the parameter or buffer itself, beside the names of states."""


class Known(NamedTuple):
    """A parameter or buffer that a rank knows.

    Attributes:
        master: the dtype of the master that it has on some ranks; "": none.
        frozen: it is not trained.
        unlike: its replicas may differ, because each rank computes its own (running statistics).
        aliases: its other names; None for buffers.
    """

    spec: TensorSpec
    master: str = ""
    frozen: bool = False
    unlike: bool = False
    aliases: tuple[str, ...] | None = None


@dataclass
class Catalogue:
    """The parameters and buffers that a rank knows, by name and in order, and those that are left out."""

    known: dict[str, Known] = field(default_factory=dict)
    excluded: list[str] = field(default_factory=list)

    def digest(self) -> bytes:
        """A hash; equal where everything is equal."""
        found = hashlib.sha256()
        for name, known in self.known.items():
            spec = known.spec
            text = f"{name!r} {spec.dtype} {spec.shape} {known.master} {known.frozen} {known.unlike} {known.aliases}\n"
            found.update(text.encode("utf-8", "surrogatepass"))
        found.update(repr(self.excluded).encode("utf-8", "surrogatepass"))
        return found.digest()[:16]


class ClientTensor(NamedTuple):
    """A tensor that only this rank knows."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def spec(self) -> TensorSpec:
        """The same as every tensor has."""
        return TensorSpec(*self)


class Row(NamedTuple):
    """Elements `[start, stop)` of a box of a tensor.

    Attributes:
        tensor: its number in the catalogue.
        box: number in the holding's `boxes`.
        keys: number in the holding's `key_sets`.
    """

    tensor: int
    box: int
    start: int
    stop: int
    keys: int


_WIDTH = len(Row._fields)


@dataclass
class Holding:
    """The regions that a rank holds.

    Attributes:
        rows: five numbers per row; see `Row`.
        boxes: the boxes; None stands for the whole tensor.
        key_sets: which members of the family a row stands for: (key, dtype); the model's own has no dtype here.
        client: tensors that only this rank knows.
        numbered: optimizer states that are one number: key -> the tensors that have one, by number.
        shaped: optimizer states with a shape of their own: (key, shape) -> the tensors that have one, by number. The
            boxes of their rows are boxes of that shape.
    """

    rows: array[int] = field(default_factory=lambda: array("q"))
    boxes: list[Box | None] = field(default_factory=lambda: [None])
    key_sets: list[tuple[tuple[str, str], ...]] = field(default_factory=list)
    client: list[ClientTensor] = field(default_factory=list)
    numbered: dict[str, array[int]] = field(default_factory=dict)
    shaped: dict[tuple[str, tuple[int, ...]], array[int]] = field(default_factory=dict)

    def digest(self) -> bytes:
        """A hash; equal where everything is equal."""
        found = hashlib.sha256(self.rows.tobytes())
        lists = [(k, v.tobytes()) for found in (self.numbered, self.shaped) for k, v in found.items()]
        facts = (self.boxes, self.key_sets, self.client, lists)
        found.update(repr(facts).encode("utf-8", "surrogatepass"))
        return found.digest()[:16]

    def __reduce__(self) -> tuple[Any, ...]:
        numbered = {key: columns.to_bytes(array("q", numbers), 1) for key, numbers in self.numbered.items()}
        shaped = {key: columns.to_bytes(array("q", numbers), 1) for key, numbers in self.shaped.items()}
        rows = columns.to_bytes(self.rows, _WIDTH)
        return _restored, (rows, self.boxes, self.key_sets, self.client, numbered, shaped)

    def each_row(self) -> Iterator[Row]:
        """The rows, in order."""
        numbers = iter(self.rows)
        return map(Row._make, zip(numbers, numbers, numbers, numbers, numbers))

    def pieces(self, names: list[str], shapes: list[tuple[int, ...]]) -> Iterator[PieceKey]:
        """The pieces in the order in which the rank has them; `names` and `shapes` are those of its catalogue."""
        for row in self.each_row():
            if row.start < row.stop:
                box = self.boxes[row.box]
                region = Region(Box.whole(shapes[row.tensor]) if box is None else box, row.start, row.stop)
                for key, _ in self.key_sets[row.keys]:
                    yield *stored_name(key, names[row.tensor]), region
        for client in self.client:
            if client.spec.numel:
                yield CLIENT, client.name, Region.whole(client.shape)


def _restored(
    rows: bytes,
    boxes: list[Box | None],
    key_sets: list[tuple[tuple[str, str], ...]],
    client: list[ClientTensor],
    numbered: dict[str, bytes],
    shaped: dict[tuple[str, tuple[int, ...]], bytes],
) -> Holding:
    numbers = {key: array("I", columns.from_bytes(data, 1)) for key, data in numbered.items()}
    found = Holding(columns.from_bytes(rows, _WIDTH), boxes, key_sets, client, numbers)
    for key, data in shaped.items():
        found.shaped[key] = array("I", columns.from_bytes(data, 1))
    return found


@dataclass(frozen=True)
class Told:
    """All that rank 0 knows of the ranks.

    Attributes:
        catalogues, holdings: one of each kind, in the order of the lowest ranks that have them.
        of_rank: the numbers of a rank's catalogue and holding.
    """

    catalogues: Sequence[Catalogue]
    holdings: Sequence[Holding]
    of_rank: Sequence[tuple[int, int]]

    @functools.cached_property
    def names(self) -> list[list[str]]:
        """The names of each catalogue, by number."""
        return [list(catalogue.known) for catalogue in self.catalogues]

    @functools.cached_property
    def first(self) -> dict[tuple[int, int], int]:
        """The lowest rank of each kind."""
        found: dict[tuple[int, int], int] = {}
        for rank, kind in enumerate(self.of_rank):
            found.setdefault(kind, rank)
        return found


def stored_name(key: str, name: str) -> tuple[str, str]:
    """Family, and name in its files, of a parameter's or buffer's member."""
    return (MODEL, name) if key == MODEL_KEY else (OPTIMIZER, f"{key}/{name}")


class HoldingBuilder:
    """Makes catalogue and holding, one tensor after the other."""

    def __init__(self) -> None:
        self.catalogue, self.holding = Catalogue(), Holding()
        self._numbers: dict[str, int] = {}
        self._boxes: dict[Box, int] = {}
        self._key_sets: dict[tuple[tuple[str, str], ...], int] = {}
        self._seen: set[tuple[int, str, int, int, int]] = set()
        self._open: tuple[int, int, int, int] | None = None
        self._keys: list[tuple[str, str]] = []

    def know(self, name: str, known: Known) -> None:
        """Take in a parameter or buffer, whether the rank has elements of it or not.

        Raises:
            CheckpointError: another one of this rank has the same name.
        """
        before = self.catalogue.known.setdefault(name, known)
        if before is known:
            self._numbers[name] = len(self._numbers)
        elif before.spec != known.spec:
            raise CheckpointError(
                f"{shown(name)} is {known.spec.dtype} of shape {known.spec.shape} and {before.spec.dtype} of shape "
                f"{before.spec.shape} on one rank; each tensor of the whole model has one name"
            )

    def hold(self, name: str, key: str, dtype: str, region: Region) -> None:
        """Take in a region of a known tensor, or of one of its states.

        Raises:
            CheckpointError: it was taken in before.
        """
        number, whole = self._numbers[name], Box.whole(self.catalogue.known[name].spec.shape)
        box = 0 if region.box == whole else self._boxes.setdefault(region.box, len(self._boxes) + 1)
        if box == len(self.holding.boxes):
            self.holding.boxes.append(region.box)
        seen = (number, key, box, region.start, region.stop)
        if seen in self._seen:
            raise CheckpointError(
                f"{shown(stored_name(key, name)[1])} is listed twice; each tensor of the whole model has one name"
            )
        self._seen.add(seen)
        place = (number, box, region.start, region.stop)
        if place != self._open:
            self._close()
            self._open = place
        self._keys.append((key, "" if key == MODEL_KEY else dtype))

    def number(self, name: str, key: str) -> None:
        """Note that a tensor has a state of this key that is one number."""
        self.holding.numbered.setdefault(key, array("I")).append(self._numbers[name])

    def shape(self, name: str, key: str, shape: tuple[int, ...]) -> None:
        """Note that a tensor has a state of this key with this shape of its own."""
        self.holding.shaped.setdefault((key, shape), array("I")).append(self._numbers[name])

    def _close(self) -> None:
        if self._open is not None:
            keys = tuple(self._keys)
            number = self._key_sets.setdefault(keys, len(self._key_sets))
            if number == len(self.holding.key_sets):
                self.holding.key_sets.append(keys)
            self.holding.rows.extend((*self._open, number))
        self._open, self._keys = None, []

    def finish(self) -> tuple[Catalogue, Holding]:
        """The catalogue and the holding of all that was added."""
        self._close()
        return self.catalogue, self.holding
