"""What the ranks of one job must have in common, and how a mistake on one of them reaches the others.

`dsx_zero` compares models, optimizers and its own section when it shards; here is the rest of the configuration, and
the time before there is a process group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

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
"""Sections that say what a rank writes down: they may differ."""

_PATIENCE = timedelta(seconds=20)


def config_facts(config: Config, request: Request) -> dict[str, str]:
    """The configuration in effect as text by path, without what is a rank's own affair (what it logs, and where to)."""
    rows = {row.path: repr(row.value) for row in config.explain().rows}
    facts = {path: text for path, text in rows.items() if not _is_own(path)}
    given = request.lr_scheduler
    if given is not None:
        made = not isinstance(given, type) and hasattr(given, "step")
        facts["initialize(lr_scheduler=...)"] = (
            type(given).__name__ if made else getattr(given, "__name__", "a callable")
        )
    return facts


def _is_own(path: str) -> bool:
    return path.split(".")[0] in _OWN or path.endswith(("path", "dir", "_file"))


def ranks_of_job(sets: RankSets | None) -> Any:
    """The process group whose ranks must have the same configuration: the data-parallel one; with model parallelism all
    ranks (None), since those that hold slices of one model step together.
    """
    return None if sets is None or len(sets.data.norm_groups) > 1 else sets.data.group


@contextmanager
def telling_others(zero: Any, comm: Any, request: Request, *, joins: bool, group: Any = None) -> Iterator[None]:
    """Around what is judged before there may be a process group: an error in it ends `initialize` on the other ranks
    too.

    Where they wait for this rank in `init_distributed`, it joins them to say so. Under `torch.distributed.elastic`
    (torchrun, `dsx launch`) it need not: the agent ends the other ranks when this one raises.

    Args:
        zero, comm: the packages `dsx_zero` and `dsx_comm`.
        joins: whether `initialize` makes the process group.
        group: the ranks of the job, where there is a process group already; None: all.
    """
    try:
        yield
    except Exception as error:
        if comm.is_initialized():
            with zero.telling(group):
                raise
        if joins and launched_as()[1] > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
            _join_and_tell(zero, comm, request, error)
        raise


def _join_and_tell(zero: Any, comm: Any, request: Request, error: Exception) -> None:
    logger.error("%s; telling the other ranks", error)
    try:
        comm.init_distributed(distributed_port=request.distributed_port, timeout=_PATIENCE, verbose=False)
        with suppress(type(error)), zero.telling():
            raise error
        comm.destroy_process_group()  # as it was: nothing is left of a call that failed
    except Exception as failure:  # noqa: BLE001 - the error of this rank is the one to report
        logger.warning("the other ranks could not be told: %s", failure)
