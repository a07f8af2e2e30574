"""Bytes of files from node to node: ranks read them on one disk, send them, and ranks of another node write them.

All ranks know the same list of transfers and walk through it in the same order; each does those in which it takes part.
So no two ranks can wait for each other: of all transfers that are not over, the first in the list has both its ranks.
The order lets pairs of ranks work side by side (`in_rounds`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointCorruptError, CheckpointError
from ..files import PIECE_BYTES, opened, write_all
from ..ranks import Ranks
from ..regions import raw_bytes
from ..spans import Range, Spans
from .topology import Nodes

__all__ = ["Transfer", "in_rounds", "packs", "run_transfers", "transfers_between"]


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


def transfers_between(nodes: Nodes, source: int, target: int, spans: Spans) -> list[Transfer]:
    """The messages that bring `spans` from one node to another, dealt out to the ranks of both."""
    senders, receivers = nodes.ranks_of(source), nodes.ranks_of(target)
    return [
        Transfer(senders[number % len(senders)], receivers[number % len(receivers)], pack)
        for number, pack in enumerate(packs(spans))
    ]


def packs(spans: Spans) -> Iterator[tuple[Range, ...]]:
    """What goes into one message each: ranges are cut, and many small ones are joined."""
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
    """Do the transfers of this rank: read from files in `folder`, or write to them and flush. Every rank calls it.

    Args:
        came: called with each range that is written here, and its bytes.
        read: fills memory with ranges that are sent; None: from `folder`.

    A rank that cannot read or write goes on with its messages, so that no other rank waits for it, and raises at the
    end.

    Raises:
        OSError, CheckpointError: the first thing that went wrong here. The ranks must agree on it afterwards.
    """
    failure: Exception | None = None
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8) if transfers else torch.empty(0, dtype=torch.uint8)
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
        """What was written is on the disk."""
        for fd in self._written.values():
            os.fsync(fd)

    def _open(self, known: dict[str, int], file: str, flags: int) -> int:
        if file not in known:
            known[file] = self._stack.enter_context(opened(self._folder / file, flags))
        return known[file]
