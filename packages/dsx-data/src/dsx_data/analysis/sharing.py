"""Divides one analysis among the ranks of a process group. A failure on one rank ends the analysis on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import AnalysisError

__all__ = ["map_and_reduce"]


def map_and_reduce(run_map: Callable[[], None], run_reduce: Callable[[], None], group: Any) -> None:
    """Run the map on every rank, then the reduction on rank 0 of `group`. Collective if there is a process group.

    Raises:
        AnalysisError: another rank failed; the text names it. A rank that failed itself raises its own error.
    """
    import dsx_comm

    if not dsx_comm.is_initialized():
        run_map()
        run_reduce()
        return
    _run_and_exchange_failure(run_map, group)
    is_first = dsx_comm.get_rank(group) == 0
    _run_and_exchange_failure(run_reduce if is_first else _nothing, group)


def _nothing() -> None:
    """Do nothing: the other ranks' part while rank 0 reduces."""


def _run_and_exchange_failure(work: Callable[[], None], group: Any) -> None:
    import dsx_comm

    failure: Exception | None = None
    try:
        work()
    except Exception as error:  # noqa: BLE001 - every rank must reach the exchange below, or the others wait forever
        failure = error
    texts: list[Any] = [None] * dsx_comm.get_world_size(group)
    dsx_comm.all_gather_object(texts, None if failure is None else str(failure), group)
    if failure is not None:
        raise failure
    failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
    if failed:
        raise AnalysisError(f"the analysis failed on rank {failed[0][0]}: {failed[0][1]}")
