"""Work of the ranks of a process group on one analysis; a failure on one rank ends it on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import AnalysisError

__all__ = ["together"]


def together(run_map: Callable[[], None], run_reduce: Callable[[], None], group: Any) -> None:
    """Run the map on every rank and then the reduction on rank 0 of the group; failures reach every rank."""
    import dsx_comm

    if not dsx_comm.is_initialized():
        run_map()
        run_reduce()
        return
    _share_failure(run_map, group)
    first = dsx_comm.get_rank(group) == 0
    _share_failure(run_reduce if first else _nothing, group)


def _nothing() -> None:
    """What the other ranks do while rank 0 reduces."""


def _share_failure(work: Callable[[], None], group: Any) -> None:
    import dsx_comm

    failure: Exception | None = None
    try:
        work()
    except Exception as error:  # noqa: BLE001 - every rank must reach the exchange below, or the others wait for ever
        failure = error
    texts: list[Any] = [None] * dsx_comm.get_world_size(group)
    dsx_comm.all_gather_object(texts, None if failure is None else str(failure), group)
    if failure is not None:
        raise failure
    failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
    if failed:
        raise AnalysisError(f"the analysis failed on rank {failed[0][0]}: {failed[0][1]}")
