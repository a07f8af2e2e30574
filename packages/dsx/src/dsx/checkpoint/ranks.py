"""The few words that ranks exchange while they save or load.

Bytes never travel between ranks here: each rank moves its own ranges to and from the disk. What travels is the
catalogue, the hashes, and whether somebody failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from .errors import CheckpointCorruptError, CheckpointError

T = TypeVar("T")


class Ranks(Protocol):
    """Who takes part. `gather` is collective and returns every rank's value in rank order."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]: ...


class Solo:
    """One process."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        """The only value there is."""
        return [value]


class GroupRanks:
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


def default_ranks(group: Any = None) -> Ranks:
    """The group's ranks when a process group exists, else this process alone."""
    import dsx_comm

    return GroupRanks(group) if dsx_comm.is_initialized() and dsx_comm.get_world_size(group) > 1 else Solo()


def together(ranks: Ranks, doing: str, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and return all results; when one fails, all raise the same error.

    Raises `CheckpointError` naming the lowest failing rank, what it was doing and its own words.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - whatever it is, the others wait in the gather below
        failure = error
    kind = CheckpointCorruptError if isinstance(failure, CheckpointCorruptError) else CheckpointError
    told = None if failure is None else (kind, f"{type(failure).__name__}: {failure}")
    outcomes = ranks.gather((result if failure is None else None, told))
    for rank, (_, failed) in enumerate(outcomes):
        if failed is not None:
            raise failed[0](f"{doing}: rank {rank} failed: {failed[1]}") from failure
    return [value for value, _ in outcomes]
