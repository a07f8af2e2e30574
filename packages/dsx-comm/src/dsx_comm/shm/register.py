"""Registers the backend "dsx" with torch.distributed, and makes its groups.

Where shared memory cannot serve (another machine among the ranks, no compiled module, not enough memory), all ranks of
the group learn the same reason and get a gloo group under the same name.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch.distributed as dist
from dsx_core import with_code
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from ..errors import CommArgumentError
from ..on_demand import gloo_group
from .segment import Member, ShmOptions, Unavailable, map_segment

logger = logging.getLogger(__name__)
NAME = "dsx"


class FallbackWarning(RuntimeWarning):
    """A group asked for as "dsx" is served by gloo; the text says why."""


def make_group(described: Any, options: Any = None) -> Any:
    """The group that torch asked for: in shared memory, else gloo with a warning on its first rank."""
    if options is not None and not isinstance(options, ShmOptions):
        raise CommArgumentError(f"pg_options: got {type(options).__name__}, expected dsx_comm.ShmOptions or None")
    options = options or ShmOptions()
    rank, size, timeout = described.group_rank, described.group_size, described.timeout
    ranks = list(described.global_ranks_in_group) or list(range(size))
    store = PrefixStore("dsx/", described.store)
    try:
        fd = map_segment(Member(store, rank, size, timeout), options)
    except Unavailable as error:
        if rank == 0 and not options.warn:
            logger.info("ranks do not share memory (%s): the group uses gloo", error)
        elif rank == 0:
            text = with_code(f"backend dsx: {error}; this group uses gloo", "DSX251")
            warnings.warn(text, FallbackWarning, stacklevel=2)
        return gloo_group(described.store, rank, size, timeout, ranks)
    from .process_group import ShmProcessGroup

    return ShmProcessGroup(described.store, rank, size, timeout, fd, ranks, options)


def register() -> None:
    """Make "dsx" known to torch; a second call does nothing."""
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, make_group, extended_api=True, devices=["cpu"])
