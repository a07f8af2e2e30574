"""Parts of a tensor: a box (offset and size per dimension), and a range of elements inside a box.

Model parallelism cuts tensors into boxes; ZeRO flattens the box of a rank and cuts it into ranges. So a rank owns a
`Region`: the elements `[start, stop)` of a box, counted row by row inside the box. Everything here is arithmetic on
integers.

    shape (4, 6), box offset (0, 2) size (4, 3), range [2, 7):

        . . a b c .        a b c d e f g h i j k l    the box, row by row
        . . d e f .            c d e f g              the region
        . . g h i .
        . . j k l .        in the whole tensor it is three runs: c, then d e f, then g
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """The elements with index `offset[d] <= i < offset[d] + size[d]` in every dimension `d`."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Is this a box of a tensor of this shape?"""
        return len(self.offset) == len(self.size) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= extent for o, s, extent in zip(self.offset, self.size, shape)
        )

    def overlaps(self, other: Box) -> bool:
        """Do the two have an element in common?"""
        edges = zip(self.offset, self.size, other.offset, other.size)
        return bool(self.numel and other.numel) and all(max(a, b) < min(a + s, b + t) for a, s, b, t in edges)


class Run(NamedTuple):
    """Elements of a region that are contiguous in the whole tensor: from `at` there, and from `first` in the region."""

    at: int
    first: int
    numel: int


@dataclass(frozen=True, order=True, slots=True)
class Region:
    """Elements `[start, stop)` of a box, in row-major order inside the box."""

    box: Box
    start: int
    stop: int

    @staticmethod
    def whole(shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return Region(Box.whole(shape), 0, math.prod(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Is this a region of a tensor of this shape?"""
        return self.box.lies_in(shape) and 0 <= self.start <= self.stop <= self.box.numel

    def runs(self, shape: Sequence[int]) -> Iterator[Run]:
        """The region as runs of a tensor of this shape: as few as possible, in ascending order in region and tensor."""
        if not self.numel:
            return
        cut = _last_cut_dimension(self.box, shape)
        length = math.prod(
            self.box.size[cut:]
        )  # contiguous elements: all full dimensions after the last one that is cut
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        position = self.start
        while position < self.stop:
            row, inside = divmod(position, length)
            at = inside + (self.box.offset[cut] * strides[cut] if shape else 0)
            for d in range(cut - 1, -1, -1):
                row, index = divmod(row, self.box.size[d])
                at += (self.box.offset[d] + index) * strides[d]
            numel = min(length - inside, self.stop - position)
            yield Run(at, position - self.start, numel)
            position += numel


def _last_cut_dimension(box: Box, shape: Sequence[int]) -> int:
    """The last dimension in which the box is not the whole tensor; 0 if there is none."""
    return next((d for d in range(len(shape) - 1, -1, -1) if box.size[d] != shape[d]), 0)


def why_not_a_tiling(shape: Sequence[int], regions: Iterable[Region]) -> str:
    """Empty if the regions cover every element of a tensor of this shape exactly once; otherwise the problem as
    text.
    """
    by_box: dict[Box, list[Region]] = {}
    for region in regions:
        if not region.lies_in(shape):
            return f"{region} does not lie in shape {tuple(shape)}"
        if region.numel:
            by_box.setdefault(region.box, []).append(region)
    for box, inside in by_box.items():
        position = 0
        for region in sorted(inside):
            if region.start != position:
                what = "a hole" if region.start > position else "an overlap"
                return f"{what} at element {min(position, region.start)} of the box at {box.offset} of size {box.size}"
            position = region.stop
        if position != box.numel:
            return f"a hole from element {position} of the box at {box.offset} of size {box.size}"
    boxes = sorted(by_box)
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            # Sorted by offset: if a box begins after this one in the first dimension, all following boxes do too.
            if box.offset and other.offset[0] >= box.offset[0] + box.size[0]:
                break
            if box.overlaps(other):
                return f"an overlap of the boxes at {box.offset} and {other.offset}"
    covered = sum(box.numel for box in boxes)
    return "" if covered == math.prod(shape) else f"{math.prod(shape) - covered} elements that nobody holds"
