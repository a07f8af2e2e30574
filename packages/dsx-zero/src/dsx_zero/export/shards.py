"""`weight_shards`: what this rank holds of each tensor, as boxes, for programs that send from rank to rank themselves.

A range of a matrix in row-major order is at most three boxes: the end of a row, whole rows, the begin of a row. Each
box is a view of the shard; nothing is copied or sent. Over all ranks the boxes of a tensor cover each element once.

Left out: adapters are not merged (a sum needs whole matrices), and nothing is cast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch

from ..errors import ZeroStateError
from ..optimizer import ZeroOptimizer
from .contents import Names, PartOfModel, boxes_of_range, contents_of

__all__ = ["WeightRange", "WeightShard", "weight_ranges", "weight_shards"]


@dataclass(frozen=True)
class WeightShard:
    """A box of a tensor that this rank holds.

    Attributes:
        name, shape: of the whole tensor.
        offset: where the box begins, in each dimension.
        values: the box; a view of this rank's memory (of host memory while states are offloaded), for reading until
            the next step. Parameters on disk are read into a new tensor.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor = field(repr=False)


def weight_shards(
    optimizer: ZeroOptimizer, *, names: Names = None, part: PartOfModel | None = None
) -> Iterator[WeightShard]:
    """This rank's boxes of every tensor, in the order of `weight_buckets`. Collective only where `part` is given.

    Args:
        optimizer: what `dsx_zero.shard` returned.
        names, part: as for `weight_buckets`. Adapters keep their names.

    Raises:
        ZeroConfigError, ZeroStateError: see `weight_buckets`.
    """
    optimizer.update.check_readable()
    contents = contents_of(optimizer, names, part, merge=False, owned=True)
    for item in contents.items:
        source = contents.sources.get(item.key)
        if source is None or not source.speaks or not item.name:
            continue
        values, done = source.read().reshape(-1), 0
        for offset, size in boxes_of_range(source.size, source.start, source.stop):
            at = tuple(one + other for one, other in zip(source.offset, offset))
            yield WeightShard(item.name, item.shape, at, values[done : done + prod(size)].view(size))
            done += prod(size)


@dataclass(frozen=True)
class WeightRange:
    """The elements of a tensor that this rank holds, in row-major order from `start` on; none of some tensors.

    Attributes:
        name, shape: of the whole tensor.
        values: 1-D; as `WeightShard.values`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor = field(repr=False)


def weight_ranges(
    optimizer: ZeroOptimizer, *, names: Names = None, part: PartOfModel | None = None
) -> Iterator[WeightRange]:
    """Every tensor on every rank, in one order, with this rank's range of it, which may be empty.

    For transfers in which all ranks go through the tensors together. Arguments and errors as of `weight_shards`.

    Raises:
        ZeroStateError: this rank has a box of a tensor (an expert, a slice), which is no range.
    """
    optimizer.update.check_readable()
    contents = contents_of(optimizer, names, part, merge=False, owned=True)
    for item in contents.items:
        if not item.name:
            continue
        source = contents.sources.get(item.key)
        if source is not None and source.speaks and source.size != item.shape:
            raise ZeroStateError(f"{item.name}: this rank has a box of it, not a range; use weight_shards")
        if source is None or not source.speaks:
            yield WeightRange(item.name, item.shape, 0, torch.empty(0, dtype=item.dtype, device=contents.device))
        else:
            yield WeightRange(item.name, item.shape, source.start, source.read().reshape(-1))
