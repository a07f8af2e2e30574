"""The agent of an elastic job: torch's, with the rules that `elastic.py` names."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, cast

from dsx_core.holding import Hold, hold
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from .agent import HostAgent
from .elastic_phases import ResumePhases
from .elastic_rendezvous import ElasticRendezvous
from .elastic_settings import MIN_NODES_VARIABLE, STOP_AFTER_LOSS_S
from .failures import RankFailure, first_cause
from .host import WORKER_SPEC_VARIABLE, HostJob, JobFolder, collect, rank_settings
from .notes import AGENT_VARIABLE, MEMORY, MIN_TIME, PROGRESS, RESTARTING, read_note
from .output import RankOutput

__all__ = ["ElasticHostAgent"]

log = logging.getLogger("dsx.launcher")


class ElasticHostAgent(HostAgent):
    """Runs the ranks of this host round after round.

    Args:
        job: this host's part of the job.
        min_nodes: the least number of hosts.
        folder: where ranks and agent leave each other notes, and ranks their failures.
    """

    stop_after_failure_s = STOP_AFTER_LOSS_S

    def __init__(self, spec: WorkerSpec, job: HostJob, min_nodes: int, *, folder: JobFolder) -> None:
        self.output = RankOutput(job.output, folder.part("output"), job.log_dir)
        super().__init__(spec, log_dir=folder.path / "elastic", failure_dir=folder.part("failures"), output=self.output)
        self._job, self._min_nodes, self._folder = job, min_nodes, folder
        self._notes = folder.part("notes")
        self._progress_at_failure = ""
        self._held: tuple[Path, Hold] | None = None
        self._phases = ResumePhases(job.host, self._notes)
        self.on_failure = self._phases.begin

    def failures(self) -> list[RankFailure]:
        """The ranks of this host that failed by themselves in the last round."""
        return collect(self._job, self.failed, self._failure_dir)

    def least_time(self) -> float:
        """Seconds between two changes of the number of hosts, as the ranks have told."""
        text = read_note(self._notes, MIN_TIME)
        return float(text) if text else 0.0

    @property
    def progress(self) -> str:
        """The update of the newest snapshot."""
        return read_note(self._notes, PROGRESS)

    def _renew_folder(self) -> None:
        """A folder that was taken away is made again: a round must not end because notes cannot be left."""
        if not self._folder.renew():
            return
        self._logs_specs = DefaultLogsSpecs(log_dir=str(self._folder.path / "elastic"))
        self._failure_dir, self._notes = self._folder.part("failures"), self._folder.part("notes")
        self._phases.notes, self.output.folder = self._notes, self._folder.part("output")

    def _hold_memory(self) -> None:
        """Hold the snapshots from when the ranks have told where they are: between two rounds no rank does."""
        memory = self.memory
        if memory is None or (self._held is not None and self._held[0] == memory):
            return
        if self._held is not None:
            self._held[1].release()
            self._held = None
        with contextlib.suppress(OSError):  # it has just gone
            self._held = memory, hold(memory)

    @property
    def memory(self) -> Path | None:
        """The folder of this host's snapshots; None if there are none."""
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
        self._renew_folder()
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
        settings = {**rank_settings(self._job, self._failure_dir, self.output), "round": rounds.round}
        os.environ[WORKER_SPEC_VARIABLE] = json.dumps(settings)
        os.environ.update({AGENT_VARIABLE: str(self._notes), MIN_NODES_VARIABLE: str(self._min_nodes)})
        started = start(worker_group)  # pyright: ignore[reportCallIssue] - torch's decorator hides the signature
        self._phases.end("starting processes")
        return started

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._phases.begin()
        with contextlib.suppress(OSError):  # a lost folder: the ranks save to disk, too
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
        self._hold_memory()
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
        cause = first_cause(self.failures())
        if self.progress != self._progress_at_failure:
            self._remaining_restarts = self._worker_group.spec.max_restarts
        self._progress_at_failure = self.progress
        if self._remaining_restarts > 0:
            what = f"rank {cause.rank}: {cause.reason}" if cause is not None else "its ranks ended"
            log.warning(
                "%s: %s; starting again (%d of %d restarts without a new snapshot left)", self._job.host, what,
                self._remaining_restarts - 1, self._worker_group.spec.max_restarts,
            )  # fmt: skip
