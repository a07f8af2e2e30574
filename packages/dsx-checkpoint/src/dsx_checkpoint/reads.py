"""Regions of tensors that the ranks of a load read, put together on their way to rank 0.

Neighbours in ZeRO read neighbouring regions. So ranks that pass on what others send make one region of two that touch,
and rank 0 gets few regions of each tensor, whatever the number of ranks. The registers of chunks (`crc.py`) are added
by xor with them. As soon as a region has the whole of a chunk, that chunk is compared, and its register is dropped: of
a region of many ranks the registers of its two ends are left.

Where several ranks read one region, it counts as many times. Copies of a region must have equal registers, and each of
them touches a copy of its neighbour. So copies of a tensor that are cut in different ways become equal regions, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from . import columns
from .boxes import Box, Region, why_not_a_tiling
from .format import Entry

__all__ = ["Reads"]

Ends = tuple[int, int]
_WIDTH = 6


@dataclass
class _Copies:
    """A region, without its box. `registers`: of chunks that it has a part of, and not the whole."""

    count: int
    registers: dict[int, int]


@dataclass
class Reads:
    """Of one rank or of several.

    Attributes:
        by_box: number of a tensor, and box -> start and stop in the box -> how often it was read, and its registers.
        wrong: tensor and chunk of chunks that have other bytes than were saved, as far as they were found.
    """

    by_box: dict[tuple[int, Box], dict[Ends, _Copies]] = field(default_factory=dict)
    wrong: set[tuple[int, int]] = field(default_factory=set)

    @property
    def left(self) -> set[tuple[int, int]]:
        """Tensor and chunk of chunks that were not compared: no region has the whole of them."""
        return {
            (tensor, number)
            for (tensor, _), spots in self.by_box.items()
            for copies in spots.values()
            for number in copies.registers
        }

    def add(self, tensor: int, region: Region, registers: Mapping[int, int]) -> None:
        """Take in a region that this rank has read."""
        if region.numel:
            spots = self.by_box.setdefault((tensor, region.box), {})
            self._put(tensor, spots, (region.start, region.stop), _Copies(1, dict(registers)))

    def _put(self, tensor: int, spots: dict[Ends, _Copies], ends: Ends, more: _Copies) -> None:
        known = spots.get(ends)
        if known is None:
            spots[ends] = more
            return
        known.count += more.count
        for number, register in more.registers.items():  # a rank may know already that a chunk is good
            if known.registers.setdefault(number, register) != register:
                self.wrong.add((tensor, number))

    @staticmethod
    def joined(one: Reads, other: Reads, entry_of: Callable[[int], Entry]) -> Reads:
        """Both. `one` is changed."""
        one.wrong |= other.wrong
        for (tensor, box), spots in other.by_box.items():
            mine = one.by_box.setdefault((tensor, box), {})
            for ends, more in spots.items():
                one._put(tensor, mine, ends, more)
            one._simplify(tensor, box, entry_of(tensor))
        return one

    def _simplify(self, tensor: int, box: Box, entry: Entry) -> None:
        """Make one region of regions that touch, and compare chunks that are whole now."""
        spots = self.by_box[tensor, box]
        if len(spots) > 1:
            spots = self.by_box[tensor, box] = self._touching(tensor, spots)
        if box == Box.whole(entry.spec.shape):
            for ends, copies in spots.items():
                self._compare_whole(tensor, entry, ends, copies.registers)

    def _touching(self, tensor: int, spots: Mapping[Ends, _Copies]) -> dict[Ends, _Copies]:
        """The same, and no region begins where another one ends."""
        found: dict[Ends, _Copies] = {}
        ending: dict[int, list[Ends]] = {}
        for (start, stop), copies in sorted(spots.items()):
            left = copies.count
            while left and ending.get(start):  # all that end here have begun before, so all of them are known
                ends = ending[start][-1]
                before = found[ends]
                count = min(left, before.count)
                registers = dict(before.registers)
                for number, register in copies.registers.items():
                    registers[number] = registers.get(number, 0) ^ register
                before.count -= count
                if not before.count:
                    del found[ends]
                    ending[start].pop()
                left -= count
                self._end(tensor, found, ending, (ends[0], stop), _Copies(count, registers))
            if left:
                self._end(tensor, found, ending, (start, stop), _Copies(left, dict(copies.registers)))
        return found

    def _end(
        self, tensor: int, found: dict[Ends, _Copies], ending: dict[int, list[Ends]], ends: Ends, copies: _Copies
    ) -> None:
        if ends not in found:
            ending.setdefault(ends[1], []).append(ends)
        self._put(tensor, found, ends, copies)

    def _compare_whole(self, tensor: int, entry: Entry, ends: Ends, registers: dict[int, int]) -> None:
        """Compare and drop the chunks that lie in a region of the whole tensor."""
        start, stop = (edge * entry.spec.itemsize for edge in ends)
        for number in list(registers):
            begin, end = entry.chunks.span(number)
            if start <= begin and end <= stop and registers.pop(number) != entry.chunks.expected(number):
                self.wrong.add((tensor, number))

    def judge(self, entry_of: Callable[[int], Entry]) -> list[int]:
        """Compare the tensors that all regions together are the whole of, once. Returns the numbers of the others.

        `wrong` is set where bytes are not those that were saved.
        """
        by_tensor: dict[int, list[tuple[Box, dict[Ends, _Copies]]]] = {}
        for (tensor, box), spots in self.by_box.items():
            by_tensor.setdefault(tensor, []).append((box, spots))
        alone = []
        for tensor, boxes in sorted(by_tensor.items()):
            entry = entry_of(tensor)
            if why_not_a_tiling(entry.spec.shape, [Region(box, *ends) for box, spots in boxes for ends in spots]):
                alone.append(tensor)
                continue
            registers: dict[int, int] = {}
            for copies in (copies for _, spots in boxes for copies in spots.values()):
                for number, register in copies.registers.items():
                    registers[number] = registers.get(number, 0) ^ register
            for number, register in registers.items():
                if register != entry.chunks.expected(number):
                    self.wrong.add((tensor, number))
        return alone

    # - As it is sent

    def __reduce__(self) -> tuple[Any, ...]:
        rows, registers, boxes = array("q"), array("I"), {}
        for tensor, box, (start, stop), copies in self._each():
            number = boxes.setdefault(box, len(boxes))
            rows.extend((tensor, number, start, stop, copies.count, len(copies.registers)))
            for item in sorted(copies.registers.items()):
                registers.extend(item)
        wrong = columns.to_bytes(array("q", chain.from_iterable(sorted(self.wrong))), 2)
        return _restored, (list(boxes), columns.to_bytes(rows, _WIDTH), registers.tobytes(), wrong)

    def _each(self) -> Iterator[tuple[int, Box, Ends, _Copies]]:
        for (tensor, box), spots in sorted(self.by_box.items()):
            for ends, copies in sorted(spots.items()):
                yield tensor, box, ends, copies


def _restored(boxes: Sequence[Box], rows: bytes, registers: bytes, wrong: bytes) -> Reads:
    chunks = iter(columns.from_bytes(wrong, 2))
    found, values = Reads(wrong=set(zip(chunks, chunks))), array("I")
    values.frombytes(registers)
    numbers, at = iter(columns.from_bytes(rows, _WIDTH)), 0
    for tensor, box, start, stop, count, length in zip(*[numbers] * _WIDTH):
        end = at + 2 * length
        copies = _Copies(count, dict(zip(values[at:end:2], values[at + 1 : end : 2])))
        found.by_box.setdefault((tensor, boxes[box]), {})[start, stop] = copies
        at = end
    return found
