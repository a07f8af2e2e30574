"""Reads and writes one whole parameter whose elements are divided among the ranks' shards. Collective.

It is used outside of forwards and backwards (``full_tensor``, in-place writes, saving); these gather whole units
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Protocol

import dsx_comm
import torch
from dsx_comm import RankSet

from ..homes.home import Home, opened, read, write
from ..plan.layout import FlatLayout, LocalSlice
from .dtensors import GlobalTensor

__all__ = ["Shards", "join_ranges", "join_whole", "joining", "read_whole", "write_all", "write_whole"]

_MESSAGE = 1 << 28
"""Bytes. From here on a message is bound by what the link carries, and another one costs nothing."""


def _slices(layout: FlatLayout, name: str) -> list[LocalSlice | None]:
    return [layout.local_slice(name, rank) for rank in range(layout.world_size)]


def read_whole(layout: FlatLayout, name: str, shard: Home, ranks: RankSet, *, device: torch.device) -> torch.Tensor:
    """The parameter ``name`` as a new tensor of its logical shape on ``device``.

    It is joined from the ``shard`` of each of ``ranks``, bitwise identical. Collective.
    """
    mine = layout.local_slice(name, ranks.rank)
    piece = None if mine is None else _elements(shard, mine)
    return join_whole(layout, name, piece, ranks, dtype=shard.dtype, device=device)


def join_whole(
    layout: FlatLayout,
    name: str,
    mine: torch.Tensor | None,
    ranks: RankSet,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Join the elements of all ranks into a new tensor with the shape of the parameter ``name`` (collective).

    Args:
        mine: this rank's elements of a tensor that is laid out like the parameter; None if it has none.
    """
    whole = torch.empty(layout.shapes[layout.index(name)], dtype=dtype, device=device)
    slices = _slices(layout, name)
    longest = max((part.numel for part in slices if part is not None), default=0)
    if not longest:
        return whole
    flat = whole.view(-1)
    piece = flat if layout.world_size == 1 else whole.new_zeros(longest)
    if mine is not None:
        piece[: mine.numel()] = mine.reshape(-1)
    if layout.world_size == 1:
        return whole
    pieces = whole.new_empty(longest * layout.world_size)
    with dsx_comm.unit(name):
        dsx_comm.all_gather_into_tensor(pieces, piece, group=ranks.group)
    for rank, part in enumerate(slices):
        if part is not None:
            flat[part.start : part.stop] = pieces[rank * longest : rank * longest + part.numel]
    return whole


def joining(
    layout: FlatLayout,
    name: str,
    ranks: RankSet,
    dtype: torch.dtype,
    device: torch.device,
    of: GlobalTensor | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`join_whole` as a plain function of this rank's elements, 1-D on any device (none: an empty tensor). Of a part of
    a global tensor (`of`) it gives the global one.
    """

    def whole(values: torch.Tensor) -> torch.Tensor:
        mine = values.to(device) if values.numel() else None
        joined = join_whole(layout, name, mine, ranks, dtype=dtype, device=device)
        return joined if of is None else of.whole(joined)

    return whole


def join_ranges(
    shape: tuple[int, ...], start: int, values: torch.Tensor, *, groups: Sequence[Any], device: torch.device
) -> torch.Tensor:
    """Join ranges of a tensor of this shape, in row-major order, into a new tensor on `device` (collective over each of
    the groups). No element is held twice, so that the sums are exact; elements that no rank has are zero.

    Args:
        start, values: this rank's elements and the place of the first, 1-D on any device; possibly none. The dtype is
            that of every rank.
        groups: process groups, one after the other.
    """
    whole = torch.zeros(prod(shape), dtype=values.dtype, device=device)
    whole[start : start + values.numel()] = values.detach().reshape(-1).to(device)
    for group in groups:
        dsx_comm.all_reduce(whole, group=group)
    return whole.view(shape)


def _elements(home: Home, part: LocalSlice | None) -> torch.Tensor:
    return read(home, 0, 0) if part is None else read(home, part.offset, part.offset + part.numel)


class Shards(Protocol):
    """An object with a rank's shard of a flat layout: a ``FlatGroup``, or a parameter of ``Init``."""

    layout: FlatLayout
    shard: Home
    ranks: RankSet
    master: Home | None


def write_whole(group: Shards, name: str, whole: torch.Tensor, *, source_rank: int = 0) -> torch.Tensor:
    """Make ``whole`` of rank ``source_rank`` the parameter's value (collective). Each rank keeps its elements, in shard
    and master.

    Args:
        source_rank: number of the rank among those that hold the parameter.

    Returns:
        The tensor of that rank. It may be ``whole`` itself, overwritten.
    """
    if whole.numel() == 0:
        return whole
    layout = group.layout
    if layout.world_size > 1:
        whole, holders = whole.contiguous(), group.ranks.holders
        with dsx_comm.unit(name):
            dsx_comm.broadcast(whole, src=dsx_comm.get_global_rank(holders, source_rank), group=holders)
    _keep(group, name, whole)
    return whole


def write_all(
    group: Shards,
    names: Sequence[str],
    whole_of: Callable[[str], torch.Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Make rank 0's values of these parameters, neighbours in the layout, their values (collective). As many of them as
    `_MESSAGE` bytes hold travel in one message, a larger one by itself.

    Args:
        whole_of: gives the whole parameter on `device`; called on every rank, in order, as it may be collective.
    """
    layout, holders = group.layout, group.ranks.holders
    for found in _messages(layout, names, dtype.itemsize):
        if len(found) == 1 or layout.world_size == 1:
            for name in found:
                write_whole(group, name, whole_of(name))
            continue
        sizes = [layout.sizes[layout.index(name)] for name in found]
        message = torch.empty(sum(sizes), dtype=dtype, device=device)
        for name, piece in zip(found, message.split(sizes)):
            piece.copy_(whole_of(name).reshape(-1))
        with dsx_comm.unit(f"{found[0]} to {found[-1]}"):
            dsx_comm.broadcast(message, src=dsx_comm.get_global_rank(holders, 0), group=holders)
        for name, piece in zip(found, message.split(sizes)):
            _keep(group, name, piece)
        # Not only dropped: the backend's thread may hold the message a moment longer, beside the next one.
        message.untyped_storage().resize_(0)


def _messages(layout: FlatLayout, names: Sequence[str], itemsize: int) -> Iterator[list[str]]:
    """The names in runs that fill a message."""
    run: list[str] = []
    room = _MESSAGE
    for name in names:
        size = layout.sizes[layout.index(name)] * itemsize
        if run and size > room:
            yield run
            run, room = [], _MESSAGE
        run.append(name)
        room -= size
    if run:
        yield run


def _keep(group: Shards, name: str, whole: torch.Tensor) -> None:
    """Keep this rank's elements of a parameter, in shard and master."""
    part = group.layout.local_slice(name, group.ranks.rank)
    if part is None or whole.numel() == 0:
        return
    values = whole.reshape(-1)[part.start : part.stop]
    if group.master is not None and group.master is not group.shard:
        with opened(group.master, part.offset, part.offset + part.numel) as master:
            # An element that is equal to the present parameter did not change: its master keeps the digits that the
            # parameter does not have.
            new, old = values.to(master.device), _elements(group.shard, part).to(master.device)
            torch.where(old == new, master, new.to(master.dtype), out=master)
    write(group.shard, values, part.offset)
