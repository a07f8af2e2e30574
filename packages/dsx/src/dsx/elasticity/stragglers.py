"""A node that holds the others up leaves the job, so that another one can take its place in the next round.

The engine compares the ranks' own work now and then (section `straggler`) and names the slow rank and phase. With
`elasticity.replace_stragglers` N, a rank that N comparisons in a row have named ends its node's agent, as a machine
that is taken away would: all ranks keep their state, and the next round begins without that node. What starts agents
(a launcher, Kubernetes, a batch system) may start another one.

Left out: judging (`dsx_monitor.StragglerMonitor`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..utils.logging import enable_console, logger

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["StragglerJudge"]


def _end_agent() -> None:
    os.kill(os.getppid(), signal.SIGTERM)


class StragglerJudge:
    """Counts how often in a row the same rank was named, on every rank alike.

    Args:
        latest: the latest comparison (`dsx_monitor.StragglerReport`); None: there was none yet.
        patience: comparisons in a row; 0: never act.
        rank: of this process.
        may_leave: whether the others could go on without this rank's node; else the reason in words.
        leave: ends this node's agent.
    """

    def __init__(
        self,
        latest: Callable[[], Any],
        patience: int,
        rank: int,
        may_leave: Callable[[], str],
        leave: Callable[[], None] = _end_agent,
    ) -> None:
        self._latest, self._patience, self._rank = latest, patience, rank
        self._may_leave, self._leave = may_leave, leave
        self._seen: Any = None
        self._named, self._times = -1, 0

    @staticmethod
    def of(engine: Engine) -> StragglerJudge:
        """The judge of an engine, as its section `elasticity` says."""
        from ..engine.observers import StragglerWatch

        parts = engine._parts
        patience = parts.config.elasticity.replace_stragglers
        watch = next((one for one in parts.watch.observers if isinstance(one, StragglerWatch)), None)
        if patience and watch is None:
            logger.warning(
                "elasticity.replace_stragglers: nothing compares the ranks; set straggler.enabled to true (and use"
                " several ranks)"
            )
        latest = (lambda: None) if watch is None else (lambda: watch.latest)
        return StragglerJudge(latest, patience, parts.topology.rank, lambda: _why_not(parts))

    def after_update(self) -> None:
        """Look at the latest comparison, if it is new."""
        report = self._latest()
        if not self._patience or report is None or report is self._seen:
            return
        self._seen = report
        worst = report.found[0] if report.found else None
        named = -1 if worst is None else worst.rank
        self._times = self._times + 1 if named == self._named else 1
        self._named = named
        if worst is None or self._times < self._patience or named != self._rank:
            return
        self._times = 0
        reason = self._may_leave()
        enable_console()  # rank 0 has one; this rank speaks for itself
        if reason:
            logger.warning("elasticity: %s; its node stays, because %s", worst, reason)
            return
        logger.warning("elasticity: %s, %d times in a row: its node leaves the job", worst, self._patience)
        self._leave()


def _why_not(parts: Any) -> str:
    """The reason that this node cannot leave; empty if it can."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "no elastic agent started this job"
    nodes, local = int(os.environ.get("GROUP_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    least = int(os.environ.get("DSX_ELASTIC_MIN_NODES", "1"))
    if nodes - 1 < max(1, least):
        return f"there are {nodes} nodes, and the job needs at least {max(1, least)}"
    from ..config.elastic import settings_from
    from ..elastic_batch import ElasticBatch, choose_batch

    chosen = choose_batch(settings_from(parts.config.elasticity))
    left = nodes * local - local
    if isinstance(chosen, ElasticBatch) and not any(size <= left for size in chosen.world_sizes):
        return f"the batch of {chosen.batch} is not shared out by {left} ranks or fewer"
    return ""
