"""Bytes of files from node to node: ranks read them on one disk, send them, and ranks of another node write them.

Transfers are planned as one list, from what the ranks miss and from what the nodes hold (`Holders`). Each rank does
those in which it takes part, in the order of the list, and needs to know no others. So no two ranks can wait for each
other: of all transfers that are not over, the first in the list has both its ranks. The order lets pairs of ranks work
side by side (`in_rounds`).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointCorruptError, CheckpointError
from ..files import PIECE_BYTES, opened, write_all
from ..ranks import Ranks
from ..regions import raw_bytes
from ..spans import PackedRanges, Range, Spans, pack_ranges, unpack_ranges
from .topology import Nodes

__all__ = [
    "Holders",
    "Transfer",
    "by_rank",
    "in_rounds",
    "packs",
    "planned_transfers",
    "run_transfers",
    "transfers_between",
]


@dataclass(frozen=True)
class Transfer:
    """Bytes that one rank sends to another in one message: at most `PIECE_BYTES`."""

    source: int
    target: int
    ranges: tuple[Range, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return sum(end - begin for _, begin, end in self.ranges)

    def __reduce__(self) -> tuple[Any, ...]:
        return _transfer, (self.source, self.target, pack_ranges(self.ranges))


def _transfer(source: int, target: int, ranges: PackedRanges) -> Transfer:
    return Transfer(source, target, tuple(unpack_ranges(*ranges)))


@dataclass(frozen=True)
class Holders:
    """The bytes that each node holds. Nodes are bits of a number, so that a range costs the same however many hold it.

    Attributes:
        by_file: file -> where its ranges begin, and the ranges `(begin, end, nodes)`, of which none overlap.
    """

    by_file: Mapping[str, tuple[Sequence[int], Sequence[tuple[int, int, int]]]]

    @staticmethod
    def of(held: Mapping[int, Spans]) -> Holders:
        """From what each node holds."""
        edges: dict[str, list[tuple[int, int]]] = {}  # where a node begins or ceases to hold a file
        for node, spans in held.items():
            for file, begin, end in spans:
                edges.setdefault(file, []).extend(((begin, node), (end, node)))
        found = {}
        for file, changes in edges.items():
            ranges: list[tuple[int, int, int]] = []
            nodes, before = 0, 0
            for at, node in sorted(changes):
                if nodes and before < at:
                    ranges.append((before, at, nodes))
                nodes ^= 1 << node
                before = at
            found[file] = ([begin for begin, *_ in ranges], ranges)
        return Holders(found)

    @property
    def spans(self) -> Spans:
        """The bytes that any node holds."""
        return Spans.of((file, begin, end) for file, (_, ranges) in self.by_file.items() for begin, end, _ in ranges)

    def nearest(self, wanted: Spans, here: int) -> dict[int, Spans]:
        """The senders of the wanted bytes to the node `here`: the node itself where it holds them, else the first
        node after it that does. Bytes that no node holds are left out.
        """
        found: dict[int, list[Range]] = {}
        for item in wanted:
            for held, nodes in self._within(item):
                following = nodes >> here
                source = here + _lowest(following) if following else _lowest(nodes)
                found.setdefault(source, []).append(held)
        return {source: Spans.of(ranges) for source, ranges in found.items()}

    def within(self, item: Range) -> Iterator[tuple[Range, tuple[int, ...]]]:
        """The parts of a range that the same nodes hold throughout, with these nodes. Bytes that no node holds are left
        out.
        """
        for held, nodes in self._within(item):
            yield held, tuple(_each(nodes))

    def _within(self, item: Range) -> Iterator[tuple[Range, int]]:
        file, begin, end = item
        starts, ranges = self.by_file.get(file, ((), ()))
        for number in range(max(0, bisect_right(starts, begin) - 1), len(ranges)):
            first, last, nodes = ranges[number]
            if first >= end:
                return
            if max(first, begin) < min(last, end):
                yield (file, max(first, begin), min(last, end)), nodes


def _each(nodes: int) -> Iterator[int]:
    while nodes:
        yield _lowest(nodes)
        nodes &= nodes - 1


def _lowest(nodes: int) -> int:
    return (nodes & -nodes).bit_length() - 1


def planned_transfers(nodes: Nodes, missing: Sequence[Spans], holders: Holders, name: str) -> list[Transfer]:
    """The messages that bring to every node what its ranks miss. Pure.

    Args:
        missing: of each rank.
        name: of the checkpoint, for the error.

    Raises:
        CheckpointCorruptError: something lies nowhere.
    """
    found: list[Transfer] = []
    for node, members in enumerate(nodes.members):
        wanted = Spans.of(item for rank in members for item in missing[rank])
        sources = holders.nearest(wanted, node) if wanted else {}
        lost = wanted.nbytes - sum(spans.nbytes for spans in sources.values())
        if lost:
            raise CheckpointCorruptError(f"{name}: {lost} bytes that node {node} needs lie on no node")
        for source, spans in sources.items():
            found += transfers_between(nodes, source, node, spans)
    return in_rounds(nodes, found)


def by_rank(nodes: Nodes, transfers: Iterable[Transfer]) -> list[list[Transfer]]:
    """Of each rank the transfers in which it takes part, in their order."""
    found: list[list[Transfer]] = [[] for _ in nodes.of_rank]
    for transfer in transfers:
        for rank in {transfer.source, transfer.target}:
            found[rank].append(transfer)
    return found


def transfers_between(nodes: Nodes, source: int, target: int, spans: Spans) -> list[Transfer]:
    """The messages that bring `spans` from one node to another, dealt out to the ranks of both."""
    senders, receivers = nodes.ranks_of(source), nodes.ranks_of(target)
    return [
        Transfer(senders[number % len(senders)], receivers[number % len(receivers)], pack)
        for number, pack in enumerate(packs(spans))
    ]


def packs(spans: Spans) -> Iterator[tuple[Range, ...]]:
    """The contents of the messages: ranges are cut, and many small ones are joined."""
    pack: list[Range] = []
    used = 0
    for file, begin, end in spans.pieces(PIECE_BYTES):
        if used + end - begin > PIECE_BYTES:
            yield tuple(pack)
            pack, used = [], 0
        pack.append((file, begin, end))
        used += end - begin
    if pack:
        yield tuple(pack)


def in_rounds(nodes: Nodes, transfers: Iterable[Transfer]) -> list[Transfer]:
    """The order in which transfers run: first from even nodes, then from odd ones, for each distance between nodes. In
    a ring of an even number of nodes each node then either sends or receives.
    """

    def order(transfer: Transfer) -> tuple[int, int]:
        source, target = nodes.of_rank[transfer.source], nodes.of_rank[transfer.target]
        return (target - source) % nodes.count, source % 2

    return sorted(transfers, key=order)  # stable


def run_transfers(
    ranks: Ranks,
    transfers: Sequence[Transfer],
    folder: Path,
    came: Callable[[Range, memoryview], None] = lambda item, data: None,
    read: Callable[[Iterable[Range], memoryview], None] | None = None,
) -> None:
    """Do the transfers of this rank, those of others left out: read from files in `folder`, or write to them and flush.
    Every rank calls it.

    Args:
        came: called with each range that is written here, and its bytes.
        read: fills memory with ranges that are sent; None: from `folder`.

    A rank that cannot read or write goes on with its messages, so that no other rank waits for it, and raises at the
    end.

    Raises:
        OSError, CheckpointError: the first thing that went wrong here. The ranks must agree on it afterwards.
    """
    failure: Exception | None = None
    buffer = (
        torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
        if transfers
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    with ExitStack() as stack:
        files = _Files(folder, stack)
        for transfer in transfers:
            message = buffer[: transfer.nbytes]
            if transfer.source == transfer.target == ranks.rank:  # from another folder of this node
                failure = failure or _try(read or files.read, transfer.ranges, raw_bytes(message))
                failure = failure or _try(files.write, transfer.ranges, raw_bytes(message))
            elif transfer.source == ranks.rank:
                failure = failure or _try(read or files.read, transfer.ranges, raw_bytes(message))
                ranks.send(message, transfer.target)
            elif transfer.target == ranks.rank:
                ranks.receive(message, transfer.source)
                failure = failure or _try(files.write, transfer.ranges, raw_bytes(message))
                _tell(came, transfer.ranges, raw_bytes(message))
        failure = failure or _try(files.sync)
    if failure is not None:
        raise failure


def _tell(came: Callable[[Range, memoryview], None], ranges: Iterable[Range], data: memoryview) -> None:
    for item in ranges:
        size = item[2] - item[1]
        came(item, data[:size])
        data = data[size:]


def _try(action: Callable[..., None], *arguments: Any) -> Exception | None:
    try:
        action(*arguments)
    except (OSError, CheckpointError) as error:
        return error
    return None


class _Files:
    """Files of one folder, opened when they are first needed."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._read: dict[str, int] = {}
        self._written: dict[str, int] = {}

    def read(self, ranges: Iterable[Range], into: memoryview) -> None:
        """Fill `into` with the ranges, one behind the other."""
        for file, begin, end in ranges:
            fd = self._open(self._read, file, os.O_RDONLY)
            data, into = into[: end - begin], into[end - begin :]
            while data:
                got = os.preadv(fd, [data], begin)
                if got == 0:
                    raise CheckpointCorruptError(f"{self._folder / file}: ends at byte {begin}; it was cut short")
                data, begin = data[got:], begin + got

    def write(self, ranges: Iterable[Range], data: memoryview) -> None:
        """Write the ranges from `data`, where they lie one behind the other."""
        for file, begin, end in ranges:
            write_all(self._open(self._written, file, os.O_WRONLY), data[: end - begin], begin)
            data = data[end - begin :]

    def sync(self) -> None:
        """Flush the written files to the disk."""
        for fd in self._written.values():
            os.fsync(fd)

    def _open(self, known: dict[str, int], file: str, flags: int) -> int:
        if file not in known:
            known[file] = self._stack.enter_context(opened(self._folder / file, flags))
        return known[file]
