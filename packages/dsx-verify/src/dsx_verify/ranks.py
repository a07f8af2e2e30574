"""The ranks that take part in an audit. Objects travel over a gloo group, so that the system's own backend is not used.

Every wait has a limit: a rank that misses a collective is an error here, and no hang.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from .errors import AuditError

__all__ = ["Ranks"]

T = TypeVar("T")
LIMIT = timedelta(minutes=5)


class Ranks:
    """All processes of the job.

    Args:
        data: (index, number) of this rank among those with different samples. Ranks with one index get equal samples:
            they share a model in another way. None: every rank has samples of its own.
    """

    def __init__(self, data: tuple[int, int] | None = None) -> None:
        live = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if live else 0
        self.size = dist.get_world_size() if live else 1
        self._group: Any = None
        if self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=LIMIT)
        self.index, self.count = (self.rank, self.size) if data is None else data
        if not 0 <= self.index < self.count <= self.size:
            raise AuditError(
                f"data_ranks: got {self.index} of {self.count} on {self.size} ranks, expected (index, number) with 0 <="
                " index < number <= ranks"
            )

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def of_rank_0(self, make: Callable[[], T]) -> T:
        """The result of `make` on rank 0, returned on every rank. An error of rank 0 is raised on all."""
        if self.size == 1:
            return make()
        sent: list[Any] = [None, ""]
        failure: Exception | None = None
        if self.rank == 0:
            try:
                sent = [make(), ""]
            except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer
                failure, sent = error, [None, f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(sent, src=0, group=self._group)
        if sent[1]:
            raise AuditError(f"plain training failed on rank 0: {sent[1]}") from failure
        return sent[0]

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
