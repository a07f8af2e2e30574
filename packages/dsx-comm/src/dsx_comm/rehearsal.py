"""One process stands for one rank of a job of any size: what it communicates is told to an observer, and nothing is
sent.

    with dsx_comm.rehearse(1024, rank=3, ranks_per_host=8, observer=watch):
        ...                                        # the code of a rank, as it is

For planning and for tests of what depends on the number of ranks. The idea: every other rank does the same with equal
values. So a gather finds this rank's values in every place, a sum is this rank's values times the number of ranks, and
what rank p sends to this one is what this one would send to itself. Words by which ranks agree (counts, hashes) are
then what they are in a job whose ranks agree. What large tensors hold is of no interest and is left as it is
(`RehearsalObserver.has_values`).

Left out: ranks that differ from each other, and failures. Messages between two ranks hold what the observer puts into
them (`received`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from . import parallel_groups
from .agreement import AGREEMENT
from .errors import CommArgumentError, CommError
from .groups import REHEARSAL, destroy_process_group, is_initialized
from .hang import WATCH
from .rehearsed_group import RehearsalGroup, RehearsalObserver, RehearsedMessage

__all__ = ["RehearsalObserver", "RehearsedMessage", "rehearse"]


@contextlib.contextmanager
def rehearse(
    world_size: int,
    rank: int = 0,
    *,
    ranks_per_host: int | None = None,
    observer: RehearsalObserver | None = None,
) -> Iterator[None]:
    """Inside the block this process is `rank` of `world_size` ranks that do what it does; nothing is sent.

    The default group is there as after `init_distributed`, and so are the variables that launchers set. Afterwards
    there is no group, and the environment is as it was.

    Args:
        world_size: number of ranks.
        rank: which of them this process is.
        ranks_per_host: neighbouring ranks on one machine; None: all.
        observer: hears of messages, and says which values matter.

    Raises:
        CommError: there is a process group already.
        CommArgumentError: numbers that do not fit together.
    """
    local = world_size if ranks_per_host is None else ranks_per_host
    if world_size < 1 or not 0 <= rank < world_size or local < 1 or world_size % min(local, world_size):
        raise CommArgumentError(
            f"rehearse: got rank {rank} of {world_size}, {local} per host; expected 0 <= rank < world_size, and hosts"
            " of equal size"
        )
    if is_initialized():
        raise CommError(
            "rehearse: there is a process group already; leave it with dsx_comm.destroy_process_group() first, or"
            " rehearse in a process of its own"
        )
    local = min(local, world_size)
    watching = observer or RehearsalObserver()

    def make(described: Any, options: Any = None) -> Any:
        size = described.group_size
        ranks = list(described.global_ranks_in_group) or list(range(size))
        return RehearsalGroup(described.group_rank, size, ranks, watching)

    known = dict(os.environ)
    calls, settings = AGREEMENT.calls, WATCH.settings
    dist.Backend.register_backend(REHEARSAL, make, extended_api=True, devices=["cpu", "cuda"])
    # There is no rank to compare calls with, and nothing can hang.
    AGREEMENT.calls, WATCH.settings = 0, replace(settings, limit=0)
    os.environ.update(_variables(world_size, rank, local))
    try:
        dist.init_process_group(REHEARSAL, store=HashStore(), rank=rank, world_size=world_size)
        yield
    finally:
        try:
            destroy_process_group()
        finally:
            parallel_groups.forget()
            AGREEMENT.calls, WATCH.settings = calls, settings
            _unregister()
            for name in set(os.environ) - set(known):
                del os.environ[name]
            os.environ.update(known)


def _variables(world_size: int, rank: int, local: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _unregister() -> None:
    """Take the backend back, whose groups belong to one rehearsal."""
    backends: Any = dist.Backend
    name = REHEARSAL.upper()
    backends._plugins.pop(name, None)
    if hasattr(backends, name):
        delattr(backends, name)
    backends.backend_capability.pop(REHEARSAL, None)
    backends.backend_type_map.pop(REHEARSAL, None)
    if REHEARSAL in backends.backend_list:
        backends.backend_list.remove(REHEARSAL)
