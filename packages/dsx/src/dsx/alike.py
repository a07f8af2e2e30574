"""Checks that the ranks of a job have the same configuration, and passes an error of one rank on to the others.

`dsx_zero` compares models, optimizers and its own section when it shards. This module is for the rest of the
configuration, and for errors before there is a process group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import dsx_comm
import dsx_zero
from dsx_comm import RankSets

from .config import Config
from .engine.request import Request, launched_as
from .utils.logging import logger

__all__ = ["config_facts", "ranks_of_job", "telling_others"]

CALL = "dsx.initialize"

_OWN = frozenset(
    {"tensorboard", "csv_monitor", "jsonl", "comet", "wandb", "log_level", "dump_state", "steps_per_print", "nebula"}
    | {"wall_clock_breakdown", "memory_breakdown"}
)
"""Sections about the output of a rank, which may differ between ranks."""

_PATIENCE = timedelta(seconds=20)


def config_facts(config: Config, request: Request, extensions: Sequence[object]) -> dict[str, str]:
    """The configuration in effect as text by path, without the sections that may differ between ranks (logs and their
    places), and what else of the arguments must be the same: the schedule, the classes of the extensions.
    """
    rows = {row.path: repr(row.value) for row in config.explain().rows}
    facts = {path: text for path, text in rows.items() if not _is_own(path)}
    given = request.lr_scheduler
    if given is not None:
        made = not isinstance(given, type) and hasattr(given, "step")
        facts["initialize(lr_scheduler=...)"] = (
            type(given).__name__ if made else getattr(given, "__name__", "a callable")
        )
    facts["initialize(extensions=...)"] = ", ".join(type(one).__name__ for one in extensions)
    return facts


def _is_own(path: str) -> bool:
    return path.split(".")[0] in _OWN or path.endswith(("path", "dir", "_file"))


def ranks_of_job(sets: RankSets | None) -> Any:
    """The process group whose ranks must have the same configuration: the data-parallel group. With model parallelism
    None (all ranks), because the ranks that hold slices of one model step together.
    """
    return None if sets is None or len(sets.data.norm_groups) > 1 else sets.data.group


@contextmanager
def telling_others(request: Request, *, joins: bool, group: Any = None) -> Iterator[None]:
    """A context for checks that may run before there is a process group. An error inside it also ends `initialize` on
    the other ranks.

    If the other ranks wait for this rank in `init_distributed`, it joins them to tell them. Under
    `torch.distributed.elastic` (torchrun, `dsx launch`) that is not needed: the agent ends the other ranks when this
    rank raises.

    Args:
        joins: whether `initialize` makes the process group.
        group: the ranks of the job, if there is a process group already; None: all ranks.
    """
    try:
        yield
    except Exception as error:
        if dsx_comm.is_initialized():
            with dsx_zero.telling(group):
                raise
        if joins and launched_as()[1] > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
            _join_and_tell(request, error)
        raise


def _join_and_tell(request: Request, error: Exception) -> None:
    logger.error("%s; telling the other ranks", error)
    try:
        dsx_comm.init_distributed(distributed_port=request.distributed_port, timeout=_PATIENCE, verbose=False)
        with suppress(type(error)), dsx_zero.telling():
            raise error
        dsx_comm.destroy_process_group()  # a call that failed leaves no process group behind
    except Exception as failure:  # noqa: BLE001 - the error of this rank is the one to report
        logger.warning("the other ranks could not be told: %s", failure)
