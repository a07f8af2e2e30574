"""The limit of open files, compared with what the job's sockets need.

`init_distributed` raises it as far as the system allows (`dsx_core.open_files`). If that is too little, it says so
before there is a group.
"""

from __future__ import annotations

from dsx_core.open_files import HOW_TO_RAISE, open_now

from .doubling import rounds
from .errors import CommError
from .on_demand import MANY_RANKS

__all__ = ["check_open_files", "files_needed"]

_SPARE = 64  # for the script itself: data, checkpoints, libraries
_GROUPS = 4  # over the host: the default one, and those for agreement, checkpoints and preemption


def files_needed(world_size: int, backend: str, *, serves: bool = False) -> int:
    """The files that a rank of a job has open beside those of before, at most.

    Args:
        backend: of the default group ("cpu:gloo,cuda:nccl").
        serves: this process has the job's store in it, to which each rank connects twice.
    """
    near = 4 + 2 * len(list(rounds(world_size)))  # a listening socket, two that the loop has, those of neighbours
    names = {part.rpartition(":")[2] for part in backend.split(",")}
    mesh = world_size - 1 if "gloo" in names or world_size < MANY_RANKS else 0
    return mesh + _GROUPS * near + (2 * world_size if serves else 2) + _SPARE


def check_open_files(limit: int, world_size: int, backend: str, *, serves: bool = False) -> None:
    """Compare the limit of open files (-1: none) with what this rank needs.

    Raises:
        CommError: it is too low. Names the limit, what is needed and how to raise it.
    """
    if limit < 0 or world_size == 1:
        return
    needed = files_needed(world_size, backend, serves=serves) + open_now()
    if needed <= limit:
        return
    names = {part.rpartition(":")[2] for part in backend.split(",")}
    way = ""
    if "gloo" in names and world_size >= MANY_RANKS:
        way = (
            f"; or do not name gloo (got {backend!r}): without a name the ranks' hosts connect on demand, to"
            f" {2 * len(list(rounds(world_size)))} ranks each instead of {world_size - 1}"
        )
    raise CommError(
        f"open files: got a hard limit of {limit}, expected at least {needed} for one of {world_size} ranks. Raise it"
        f" where the ranks are started {HOW_TO_RAISE}{way}",
        code="DSX209",
    )
