"""The small messages that ranks exchange while they save or load.

Each rank moves its own ranges to and from the disk. Rank 0 gets what the ranks hold and the hashes, and gives each rank
its part of the plan; all ranks tell each other only whether one failed. They send bytes of tensors only if the nodes
share no file system (`nodes/transfers.py`).

Messages to and from rank 0 go along the tree of `dsx_comm.gather_object`, in which no rank talks to more than log2 of
all.
"""

from __future__ import annotations

import functools
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dsx_core import Together

from .errors import CheckpointArgumentError, CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_TAG = 0x3D5C0000  # of objects from rank to rank
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

    def join(self, value: T, joining: Callable[[T, T], T]) -> T | None:
        """What `joining` makes of all ranks' values, two at a time, in rank order, on rank 0; None on the others."""
        values = self.collect(value)
        return functools.reduce(joining, values) if values else None

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

    def joined_first(
        self,
        doing: str,
        action: Callable[[], T],
        joining: Callable[[T, T], T],
        answer: Callable[[T], Sequence[Any]],
        *,
        answering: str = "",
    ) -> Any:
        """Like `through_first`, for results of which `joining` makes one out of two on their way to rank 0."""
        return self._all().joined_first(doing, action, joining, answer, answering=answering)

    def first_for_all(self, doing: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and give its result to all ranks, or raise its error on all."""
        return self.through_first("", _nothing, lambda _: [action()] * self.world_size, answering=doing)

    def _all(self) -> Together:
        return Together(
            self.gather, self.rank, self.world_size, _KINDS, collect=self.collect, deal=self.deal, join=self.join
        )


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
        from dsx_comm.object_tree import packed, unpacked

        self._packed, self._unpacked = packed, unpacked
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
        """`gather_object` to the group's rank 0."""
        values: list[Any] = [None] * self.world_size if self.rank == 0 else []
        self._comm.gather_object(value, values or None, group=self._group, group_dst=0)
        return values

    def deal(self, values: Sequence[Any] | None) -> Any:
        """`scatter_object_list` from the group's rank 0."""
        mine: list[Any] = [None]
        self._comm.scatter_object_list(mine, values, group=self._group, group_src=0)
        return mine[0]

    def join(self, value: T, joining: Callable[[T, T], T]) -> T | None:
        """`join_objects` to the group's rank 0."""
        return self._comm.join_objects(value, joining, group=self._group, group_dst=0)

    def send_object(self, value: Any, to: int) -> None:
        """As a pickle."""
        self._send_bytes(self._packed(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)), to)

    def receive_object(self, source: int) -> Any:
        """From a pickle."""
        return pickle.loads(self._unpacked(self._receive_bytes(source)))

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
