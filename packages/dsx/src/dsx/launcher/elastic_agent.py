"""The agent of an elastic job: torch's, with the rules that `elastic.py` names."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState

from ..elasticity.notes import AGENT_VARIABLE, MEMORY, PROGRESS, RESTARTING, read_note
from .agent import HostAgent
from .elastic_phases import ResumePhases
from .elastic_rendezvous import ElasticRendezvous
from .elastic_settings import MIN_NODES_VARIABLE, STOP_AFTER_LOSS_S
from .failures import first_cause
from .host import WORKER_SPEC_VARIABLE, HostJob, collect, rank_settings
from .stand_by import RankSource, ranks_from

__all__ = ["ElasticHostAgent"]

log = logging.getLogger("dsx.launcher")


class ElasticHostAgent(HostAgent):
    """Runs the ranks of this host round after round.

    Args:
        job: this host's part of the job.
        notes: a folder in which ranks and agent leave each other notes.
        ranks: what starts the processes of the ranks.
    """

    stop_after_failure_s = STOP_AFTER_LOSS_S

    def __init__(
        self, spec: WorkerSpec, job: HostJob, *, log_dir: Path, failure_dir: Path, notes: Path, ranks: RankSource
    ) -> None:
        super().__init__(spec, log_dir=log_dir, failure_dir=failure_dir)
        self._job, self._notes, self._ranks = job, notes, ranks
        self._progress_at_failure = ""
        self._phases = ResumePhases(job.host, notes)
        self.on_failure = self._phases.begin

    def variables(self, min_nodes: int) -> dict[str, str]:
        """What the ranks find in their environment."""
        return {AGENT_VARIABLE: str(self._notes), MIN_NODES_VARIABLE: str(min_nodes)}

    @property
    def progress(self) -> str:
        """The update of the newest snapshot."""
        return read_note(self._notes, PROGRESS)

    @property
    def memory(self) -> Path | None:
        """Where this host's snapshots are; None where there are none."""
        text = read_note(self._notes, MEMORY)
        return Path(text) if text and Path(text).is_dir() else None

    def free_memory(self) -> None:
        """Remove this host's snapshots: the ranks have saved to disk."""
        folder = self.memory
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another host's snapshots are there
                folder.parent.rmdir()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.failed, self.exitcodes, self._reported_at = {}, {}, None
        for path in self._failure_dir.glob("rank*"):
            path.unlink(missing_ok=True)
        (self._notes / RESTARTING).unlink(missing_ok=True)
        self._phases.forget_ranks()
        first = worker_group.workers[0]
        log.info(
            "%s: round with %s hosts and %d ranks", self._job.host, worker_group.group_world_size, first.world_size
        )
        start = super()._start_workers
        rounds = cast(ElasticRendezvous, self._worker_group.spec.rdzv_handler)
        settings = {**rank_settings(self._job, self._failure_dir), "round": rounds.round}
        os.environ[WORKER_SPEC_VARIABLE] = json.dumps(settings)
        with ranks_from(self._ranks):
            started = start(worker_group)  # pyright: ignore[reportCallIssue] - torch's decorator hides the signature
        self._phases.end("starting processes")
        return started

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._phases.begin()
        (self._notes / RESTARTING).touch()  # before they are asked to end: their memory is enough
        restart = super()._restart_workers
        restart(worker_group)  # pyright: ignore[reportCallIssue] - as above

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        stop = super()._stop_workers
        stop(worker_group)  # pyright: ignore[reportCallIssue] - as above
        self._phases.end("stopping")

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        meet = super()._rendezvous
        meet(worker_group)  # pyright: ignore[reportCallIssue] - as above
        self._phases.end("rendezvous")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._phases.look()
        watched = super()._monitor_workers
        result = watched(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._judge()
        return result

    def _judge(self) -> None:
        """Decide how many restarts are left, before torch takes one."""
        if self.can_resume and not self.failed:
            self._remaining_restarts += 1  # they have saved and ended because a host leaves: no failure
            return
        cause = first_cause(collect(self._job, self.failed, self._failure_dir))
        if self.progress != self._progress_at_failure:
            self._remaining_restarts = self._worker_group.spec.max_restarts
        self._progress_at_failure = self.progress
        if self._remaining_restarts > 0:
            what = f"rank {cause.rank}: {cause.reason}" if cause is not None else "its ranks ended"
            log.warning(
                "%s: %s; starting again (%d of %d restarts without a new snapshot left)", self._job.host, what,
                self._remaining_restarts - 1, self._worker_group.spec.max_restarts,
            )  # fmt: skip
