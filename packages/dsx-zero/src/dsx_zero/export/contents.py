"""The tensors that a model has for the outside, and the elements of them that this rank holds.

A tensor has the name that it has in the whole model, on one rank and without wrappers. This rank may hold all of it (a
parameter below stage 3), a range of it (stage 3), a box (an expert, a tensor slice), or a range of a box. Every element
has one rank that speaks for it, so that the ranks' parts put together are the tensor.

Nothing here communicates except `contents_of` of a model of which other ranks hold other parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import dsx_comm
import torch
from torch import nn

from ..errors import ZeroConfigError
from ..optimizer import ZeroOptimizer
from ..plan.rank_sets import ranks_of_buffers
from ..state.moving import OffloadStateTypeEnum
from .adapters import Adapter, adapters_of, plain_name

__all__ = ["Contents", "Item", "Names", "PartOfModel", "Source", "WholePlace", "boxes_of_range", "contents_of"]

Names = Callable[[str], str | None] | Collection[str] | None
"""The tensors that are wanted, and their names: a function from a name to another one, or to None for a tensor that is
not wanted; or the wanted names; or None for all.
"""


class WholePlace(Protocol):
    """The place of a rank's tensor: name and shape of the whole one, and the box in it (`dsx_checkpoint.Place`)."""

    name: str
    shape: tuple[int, ...]
    box: Any


@dataclass(frozen=True)
class PartOfModel:
    """Says that other ranks hold other parts of the model: experts, slices of tensors, stages of a pipeline.

    Attributes:
        places: by the name on this rank, for every tensor of which it holds a part only, or which has another name in
            the whole model.
        group: the ranks that hold the whole model together; None: all.
        speaks: False on ranks that hold the same as another rank wherever `places` says nothing (tensor slices).
    """

    places: Mapping[str, WholePlace] = field(default_factory=dict)
    group: Any = None
    speaks: bool = True


@dataclass(frozen=True)
class Item:
    """A tensor of the whole model, the same on all ranks.

    Attributes:
        name: under which it is given.
        key: under which this module knows it.
        shape, dtype: of the whole tensor.
        matrix: whether it is the weight of an `nn.Linear`.
        whole: whether every rank has all of it in its memory.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    matrix: bool
    whole: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Source:
    """This rank's part of a tensor: elements `[start, stop)` of a box, in row-major order of the box.

    `read` gives them 1-D, or in the tensor's shape; not a copy where they are in memory.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    stop: int
    speaks: bool
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Contents:
    """The result of `contents_of`.

    Attributes:
        items: in one order on all ranks.
        sources: by key, of the tensors of which this rank holds something.
        adapters: by the key of the weight that they change.
        group: the ranks that hold the items together.
        size: their number.
        device: on which the model computes.
    """

    items: tuple[Item, ...]
    sources: Mapping[str, Source]
    adapters: Mapping[str, tuple[Adapter, ...]]
    group: Any
    size: int
    device: torch.device


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements `[start, stop)` of a tensor in row-major order as boxes (offset, size), in that order: at most
    2 * dims - 1 of them.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    if rest := start % inner:
        row, end = start // inner, min(stop, (start // inner + 1) * inner)
        for offset, size in boxes_of_range(shape[1:], rest, rest + end - start):
            yield (row, *offset), (1, *size)
        start = end
    if full := (stop - start) // inner:
        yield (start // inner, *[0] * (len(shape) - 1)), (full, *shape[1:])
        start += full * inner
    for offset, size in boxes_of_range(shape[1:], 0, stop - start):
        yield (start // inner, *offset), (1, *size)


def contents_of(
    optimizer: ZeroOptimizer, names: Names, part: PartOfModel | None, *, merge: bool, owned: bool = False
) -> Contents:
    """The tensors of a sharded model: parameters (a tied one once) and persistent buffers, in definition order.

    Collective where `part` says that ranks hold different tensors.

    Args:
        merge: leave out the matrices of adapters, which are merged into other tensors.
        owned: the sources are what this rank speaks for, also of tensors that every rank has.

    Raises:
        ZeroConfigError: `names` are not names of the model, or give one name to two tensors; an adapter that cannot be
            merged.
    """
    run, places = optimizer.runtime, {} if part is None else part.places
    adapters, hidden = adapters_of(run.model, needed=merge)
    found: dict[str, Item] = {}
    sources: dict[str, Source] = {}
    matrices = {f"{n}.weight" for n, m in run.model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    for local, shape, dtype, whole, source in _held(optimizer, part, joined=owned or part is not None):
        place = places.get(local)
        key = local if place is None else place.name
        name = plain_name(key, hidden, merged=merge)
        if name is None:
            name = ""  # part of an adapter: needed for its sum, not given
        found[key] = Item(name, key, shape if place is None else tuple(place.shape), dtype, local in matrices, whole)
        if source is not None:
            sources[key] = source
    ranks = run.ranks.group if part is None else part.group
    if part is not None:
        found = dsx_comm.merge_objects(found, lambda one, other: {**other, **one}, ranks)
    devices = [group.key.device for unit in run.units for group in unit.groups]
    return Contents(
        items=tuple(_named(found.values(), names)),
        sources=sources,
        adapters=adapters if merge else {},
        group=ranks,
        size=dsx_comm.get_world_size(ranks) if dsx_comm.is_initialized() else 1,
        device=devices[0] if devices else torch.device("cpu"),
    )


def _held(
    optimizer: ZeroOptimizer, part: PartOfModel | None, *, joined: bool
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, bool, Source | None]]:
    """Name, shape, dtype, whether every rank has it whole, and the source, of all tensors of this rank's model."""
    run, held = optimizer.runtime, {}
    places = {} if part is None else part.places
    for info in run.infos:
        group = optimizer.layout.group_of(info.name)
        held.update(dict.fromkeys((info.name, *info.aliases), group.ranks))
        whole = (
            not joined and group.visible is not None and OffloadStateTypeEnum.lp_params not in optimizer.moved.stashes
        )
        speaks = group.ranks.first_copy and group.ranks.counts_in_norm
        speaks = speaks and (part is None or part.speaks or info.name in places)
        piece, read = optimizer.held.part_of(info.name, whole=whole)
        offset = tuple(places[info.name].box.offset) if info.name in places else (0,) * len(info.shape)
        source = Source(offset, tuple(info.shape), piece.start, piece.stop, speaks, read)
        yield info.name, tuple(info.shape), info.dtype, whole, source if piece.numel or whole else None
    ranks_of = {id(buffer): ranks for buffer, ranks in ranks_of_buffers(run.model, held, run.ranks)}
    for prefix, module in run.model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            local, shape, ranks = f"{prefix}.{name}" if prefix else name, tuple(buffer.shape), ranks_of[id(buffer)]
            offset = tuple(places[local].box.offset) if local in places else (0,) * len(shape)
            speaks = ranks.rank == 0 and ranks.first_copy and (part is None or part.speaks or local in places)
            source = Source(offset, shape, 0, buffer.numel(), speaks, buffer.detach)
            yield local, shape, buffer.dtype, not joined, source


def _named(items: Collection[Item], names: Names) -> Iterator[Item]:
    """The items under the names that were asked for. Those without a name are kept (`Item.name` is empty)."""
    if names is not None and not callable(names):
        if isinstance(names, str):
            raise ZeroConfigError("names", f"got the text {names!r}, expected a function, or a collection of names")
        unknown = sorted(set(names) - {item.name for item in items})
        if unknown:
            raise ZeroConfigError("names", f"the model has no tensor {', '.join(map(repr, unknown[:5]))}")
    taken: dict[str, str] = {}
    for item in items:
        wanted: str | None = item.name
        if wanted and names is not None:
            wanted = names(item.name) if callable(names) else (item.name if item.name in names else None)
        if wanted and wanted in taken:
            raise ZeroConfigError("names", f"{taken[wanted]} and {item.key} are both given as {wanted!r}")
        if wanted:
            taken[wanted] = item.key
        yield Item(wanted or "", item.key, item.shape, item.dtype, item.matrix, item.whole)
