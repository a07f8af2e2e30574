"""The small messages that ranks exchange while they save or load.

Each rank moves its own ranges to and from the disk. Ranks send each other the catalogue, the hashes, and
whether a rank failed. They send bytes of tensors only if the nodes share no file system (`nodes/transfers.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from dsx_core import Together

from .errors import CheckpointArgumentError, CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_KINDS = (CheckpointCorruptError, CheckpointArgumentError, CheckpointError)


class Ranks:
    """The processes that take part. Every method is collective: all ranks call it, in the same order."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
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

    def _all(self) -> Together:
        return Together(self.gather, self.rank, self.world_size, _KINDS)


class Solo(Ranks):
    """One process."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        """The only value there is."""
        return [value]


class GroupRanks(Ranks):
    """The ranks of a process group, which must reach a common file system."""

    def __init__(self, group: Any = None) -> None:
        import dsx_comm

        self._comm, self._group = dsx_comm, group
        self.rank = dsx_comm.get_rank(group)
        self.world_size = dsx_comm.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """`all_gather_object` over the group."""
        values: list[Any] = [None] * self.world_size
        self._comm.all_gather_object(values, value, group=self._group)
        return values

    def send(self, data: torch.Tensor, to: int) -> None:
        """`dsx_comm.send` over the group, which must carry host memory."""
        self._comm.send(data, group=self._group, group_dst=to)

    def receive(self, data: torch.Tensor, source: int) -> None:
        """`dsx_comm.recv` over the group."""
        self._comm.recv(data, group=self._group, group_src=source)

    def all_to_all(self, output: Any, given: Any, come: list[int], sent: list[int]) -> None:
        """Send parts of the host tensor `given` to the ranks, `sent[r]` elements to rank r, and fill `output` with the
        `come[r]` elements that rank r sends.
        """
        self._comm.all_to_all_single(output, given, come, sent, group=self._group)


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
