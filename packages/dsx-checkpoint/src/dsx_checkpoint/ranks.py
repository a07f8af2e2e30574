"""The small messages that ranks exchange while they save or load.

Each rank moves its own ranges to and from the disk. Rank 0 gets what the ranks hold and the hashes, and gives each rank
its part of the plan; all ranks tell each other only whether one failed. They send bytes of tensors only if the nodes
share no file system (`nodes/transfers.py`).

Messages to and from rank 0 go along a tree, in which a rank talks to at most `FAN_OUT - 1` others per level:

    rank 0:  1 .. 31, and 32, 64, 96 ..      rank 32:  33 .. 63, and rank 0
"""

from __future__ import annotations

import os
import pickle
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dsx_core import Together

from .errors import CheckpointArgumentError, CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
FAN_OUT = 32
_TAG = 0x3D5C0000  # of messages in the tree
_WORTH_PACKING = 512  # bytes
_KINDS = (CheckpointCorruptError, CheckpointArgumentError, CheckpointError)


class Ranks:
    """The processes that take part. Every method is collective: all ranks call it, in the same order."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        raise NotImplementedError

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on rank 0; an empty list on the others."""
        values = self.gather(value)
        return values if self.rank == 0 else []

    def deal(self, values: Sequence[Any] | None) -> Any:
        """Rank 0 gives a value for each rank (the others None); returns this rank's."""
        return self.gather(values)[0][self.rank]

    def send_object(self, value: Any, to: int) -> None:
        """Send a small value to one rank, which calls `receive_object`."""
        raise NotImplementedError

    def receive_object(self, source: int) -> Any:
        """What a rank sends."""
        raise NotImplementedError

    def send(self, data: torch.Tensor, to: int) -> None:
        """Send host memory, of dtype uint8, to one rank, which calls `receive` with as many bytes."""
        raise NotImplementedError

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Fill host memory, of dtype uint8, with what a rank sends."""
        raise NotImplementedError

    def together(self, doing: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return all results; when it fails on one rank, all ranks raise the same error.

        `action` must not be collective: a rank that fails before a collective would leave the others waiting in it.

        Raises:
            CheckpointError: names the lowest failing rank, what it was doing and its own words. Errors of this package
                keep their class, all others become this one; the failing rank has the original as `__cause__`.
        """
        return self._all().run(doing, action)

    def all_or_none(self, doing: str, action: Callable[[], T]) -> T:
        """Like `together`, but each rank keeps its own result, which is not sent."""
        return self._all().keep(doing, action)

    def through_first(
        self, doing: str, action: Callable[[], T], answer: Callable[[list[T]], Sequence[Any]], *, answering: str = ""
    ) -> Any:
        """Run `action` on every rank and `answer` on rank 0 with all results; returns this rank's item of the answer.
        When one of them fails, all ranks raise the same error. Neither may be collective.

        Args:
            answering: what rank 0 does in `answer`, for its error; "": the error has rank 0's words alone.
        """
        return self._all().through_first(doing, action, answer, answering=answering)

    def first_for_all(self, doing: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and give its result to all ranks, or raise its error on all."""
        return self.through_first("", _nothing, lambda _: [action()] * self.world_size, answering=doing)

    def _all(self) -> Together:
        return Together(self.gather, self.rank, self.world_size, _KINDS, collect=self.collect, deal=self.deal)


class Solo(Ranks):
    """One process."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        """The only value there is."""
        return [value]

    def deal(self, values: Sequence[Any] | None) -> Any:
        """The only value there is."""
        return None if values is None else values[0]


class GroupRanks(Ranks):
    """The ranks of a process group, which must reach a common file system."""

    def __init__(self, group: Any = None) -> None:
        import dsx_comm
        from dsx_comm.groups import member

        self._comm, self._group = dsx_comm, group
        self._device = member(group).message_device
        self.rank = dsx_comm.get_rank(group)
        self.world_size = dsx_comm.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """`all_gather_object` over the group."""
        values: list[Any] = [None] * self.world_size
        self._comm.all_gather_object(values, value, group=self._group)
        return values

    def collect(self, value: Any) -> list[Any]:
        """Along the tree of `children_of`: a rank passes on what it got from those below it."""
        packs = [_packed(value)]
        for child, _ in children_of(self.rank, self.world_size):
            packs += pickle.loads(self._receive_bytes(child))
        if self.rank:
            self._send_bytes(pickle.dumps(packs), parent_of(self.rank))
            return []
        return [value, *map(_unpacked, packs[1:])]

    def deal(self, values: Sequence[Any] | None) -> Any:
        """Along the same tree: a rank gets the values of all ranks below it too."""
        if self.rank:
            values = _unpacked(self._receive_bytes(parent_of(self.rank)))
        given = list(values or ())
        for child, end in children_of(self.rank, self.world_size):
            # In one pickle a value that many ranks get is there once.
            self._send_bytes(_packed(given[child - self.rank : end - self.rank]), child)
        return given[0]

    def send_object(self, value: Any, to: int) -> None:
        """As a pickle."""
        self._send_bytes(_packed(value), to)

    def receive_object(self, source: int) -> Any:
        """From a pickle."""
        return _unpacked(self._receive_bytes(source))

    def _send_bytes(self, data: bytes, to: int) -> None:
        import torch

        for values in (torch.tensor([len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8)):
            self._comm.send(values.to(self._device), group=self._group, group_dst=to, tag=_TAG)

    def _receive_bytes(self, source: int) -> bytes:
        import torch

        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._comm.recv(length, group=self._group, group_src=source, tag=_TAG)
        data = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        self._comm.recv(data, group=self._group, group_src=source, tag=_TAG)
        return self._comm.host_bytes(data.cpu())

    def send(self, data: torch.Tensor, to: int) -> None:
        """`dsx_comm.send` over the group, which must carry host memory."""
        self._comm.send(data, group=self._group, group_dst=to)

    def receive(self, data: torch.Tensor, source: int) -> None:
        """`dsx_comm.recv` over the group."""
        self._comm.recv(data, group=self._group, group_src=source)


def host_label() -> str:
    """What is equal for ranks of one host: ranks that one launcher's agent has started there."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def numbered(labels: Sequence[str]) -> tuple[int, ...]:
    """The number of each label, by the first place of that label."""
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return tuple(numbers[label] for label in labels)


def children_of(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranks below a rank in the tree, each with the end of the range of ranks that it passes messages on for."""
    step = 1
    while step < size and rank % (step * FAN_OUT) == 0:
        for child in range(rank + step, min(rank + step * FAN_OUT, size), step):
            yield child, min(child + step, size)
        step *= FAN_OUT


def parent_of(rank: int) -> int:
    """The rank above a rank in the tree; not for rank 0."""
    step = FAN_OUT
    while rank % step == 0:
        step *= FAN_OUT
    return rank - rank % step


def _packed(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return b"z" + zlib.compress(data, 1) if len(data) >= _WORTH_PACKING else b"p" + data


def _unpacked(data: bytes) -> Any:
    return pickle.loads(zlib.decompress(memoryview(data)[1:]) if data[:1] == b"z" else memoryview(data)[1:])


def _nothing() -> None:
    """What ranks do while rank 0 works."""


def default_ranks(group: Any = None) -> Ranks:
    """The group's ranks when a process group exists, else this process alone."""
    import dsx_comm

    return GroupRanks(group) if dsx_comm.is_initialized() and dsx_comm.get_world_size(group) > 1 else Solo()


def ranks_of_own() -> Ranks:
    """All ranks, over a process group that nothing else uses, for a thread of its own. Collective where there are
    several.
    """
    ranks = default_ranks()
    if ranks.world_size == 1:
        return ranks
    import dsx_comm
    import torch

    backend = dsx_comm.host_backend(ranks.world_size) if torch.distributed.is_gloo_available() else None
    return GroupRanks(dsx_comm.new_group(backend=backend, description="dsx checkpoints"))
