"""The small messages that ranks exchange while they save or load.

Each rank moves its own ranges to and from the disk. Rank 0 gets what the ranks hold and the hashes, and gives each rank
its part of the plan; all ranks tell each other only whether one failed (of many ranks, rank 0 tells it). They send
bytes of tensors only if the nodes share no file system (`nodes/transfers.py`).

Messages to and from rank 0 go along the tree of `dsx_comm.gather_object`, in which no rank talks to more than log2 of
all.
"""

from __future__ import annotations

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


class Ranks(Together):
    """The processes that take part in a save or load. Errors of this package keep their class on all ranks, all others
    become a `CheckpointError`.

    Args:
        gather, rank, world_size: as for `dsx_core.Together`.
    """

    def __init__(self, gather: Callable[[Any], list[Any]], rank: int, world_size: int) -> None:
        super().__init__(gather, rank, world_size, _KINDS)

    def send_object(self, value: Any, to: int) -> None:
        """Send a small value to one rank, which calls `receive_object`."""
        raise NotImplementedError

    def receive_object(self, source: int) -> Any:
        """Receive the value that a rank sends."""
        raise NotImplementedError

    def send(self, data: torch.Tensor, to: int) -> None:
        """Send host memory, of dtype uint8, to one rank, which calls `receive` with as many bytes."""
        raise NotImplementedError

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Fill host memory, of dtype uint8, with what a rank sends."""
        raise NotImplementedError


class Solo(Ranks):
    """One process."""

    def __init__(self) -> None:
        super().__init__(lambda value: [value], 0, 1)

    def deal(self, values: Sequence[Any] | None) -> Any:
        """The only value there is."""
        return None if values is None else values[0]


class GroupRanks(Ranks):
    """The ranks of a process group, which must reach a common file system."""

    def __init__(self, group: Any = None) -> None:
        import dsx_comm
        from dsx_comm.groups import member
        from dsx_comm.object_tree import NotJoined, ObjectTree, host_bytes, packed, unpacked
        from dsx_comm.on_demand import MANY_RANKS

        self._packed, self._unpacked, self._host_bytes = packed, unpacked, host_bytes
        self._tree, self._not_joined, self._many = ObjectTree, NotJoined, MANY_RANKS
        self._comm, self._group, self._member = dsx_comm, group, member(group)
        self._device = self._member.message_device
        super().__init__(self._all_gather, dsx_comm.get_rank(group), dsx_comm.get_world_size(group))

    def _all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        self._comm.all_gather_object(values, value, group=self._group)
        return values

    def keep(self, doing: str, action: Callable[[], T]) -> T:
        """As `Together.keep`. Of many ranks none hears from each of the others: that one has failed goes to rank 0, and
        from there to all. For a few ranks that takes longer than an all-gather.
        """
        if self.world_size < self._many:
            return super().keep(doing, action)
        kept: list[T] = []
        self.joined_first(
            doing, lambda: kept.append(action()), lambda one, other: None, lambda _: [None] * self.world_size
        )
        return kept[0]

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
        """The value of `joining` for all values, on rank 0. If it fails, rank 0 raises alone: it tells the others."""
        found = self._tree(self._member, 0, "join_objects", {}).join(value, joining)
        if isinstance(found, self._not_joined):
            raise CheckpointError(found.words)
        return found

    def send_object(self, value: Any, to: int) -> None:
        """As a pickle."""
        self._send_bytes(self._packed(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)), to)

    def receive_object(self, source: int) -> Any:
        """From a pickle."""
        return pickle.loads(self._unpacked(self._receive_bytes(source)))

    def _send_bytes(self, data: bytes, to: int) -> None:
        import torch

        for values in (torch.tensor([len(data)], device="cpu"), torch.frombuffer(bytearray(data), dtype=torch.uint8)):
            self._comm.send(values.to(self._device), group=self._group, group_dst=to, tag=_TAG)

    def _receive_bytes(self, source: int) -> bytes:
        import torch

        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._comm.recv(length, group=self._group, group_src=source, tag=_TAG)
        data = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        self._comm.recv(data, group=self._group, group_src=source, tag=_TAG)
        return self._host_bytes(data.cpu())

    def send(self, data: torch.Tensor, to: int) -> None:
        """`dsx_comm.send` over the group, which must carry host memory."""
        self._comm.send(data, group=self._group, group_dst=to)

    def receive(self, data: torch.Tensor, source: int) -> None:
        """`dsx_comm.recv` over the group."""
        self._comm.recv(data, group=self._group, group_src=source)


def host_label() -> str:
    """A label that the ranks of one host share: those that one launcher's agent has started there."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def numbered(labels: Sequence[str]) -> tuple[int, ...]:
    """The number of each label, by the first place of that label."""
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return tuple(numbers[label] for label in labels)


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
