"""The agent and the rendezvous of an elastic job: torch's, with the rules that `elastic.py` names."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _RendezvousExitOp,
)

from ..elasticity.notes import AGENT_VARIABLE, MEMORY, MIN_TIME, PROGRESS, RESTARTING
from .agent import HostAgent
from .elastic_settings import (
    CLOSE_S,
    JOIN_S,
    KEEP_ALIVE_S,
    KEEP_ALIVE_TIMES,
    LAST_CALL_S,
    MIN_NODES_VARIABLE,
    Elastic,
)
from .errors import LaunchError
from .failures import first_cause
from .host import HostJob, collect

log = logging.getLogger("dsx.launcher")

_UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class ElasticRendezvous(DynamicRendezvousHandler):
    """torch's rendezvous, with a least time between two changes and a way to leave."""

    notes: Path | None = None

    def num_nodes_waiting(self) -> int:
        """How many hosts wait for a new round; none before `elasticity.min_time` is over."""
        waiting = super().num_nodes_waiting()
        return waiting if time.monotonic() - self._began >= self._least_time() else 0

    def next_rendezvous(self) -> Any:
        """See torch."""
        found = super().next_rendezvous()
        self._began = time.monotonic()
        return found

    _began = 0.0

    def _least_time(self) -> float:
        text = read_note(self.notes, MIN_TIME)
        return float(text) if text else 0.0

    def leave(self) -> None:
        """Take this host out of the round, so that the others need not find out by its silence."""
        self._stop_heartbeats()
        try:
            self._op_executor.run(_RendezvousExitOp(), self._get_deadline(timedelta(seconds=CLOSE_S)))
        except RendezvousError as error:
            log.debug("the rendezvous does not answer: %s", error)


def meet(job: HostJob, elastic: Elastic, notes: Path) -> ElasticRendezvous:
    """This host's way into the rounds of a job. Raises `LaunchError` where the store does not answer."""
    # Without it torch gives later rounds a store in which the addresses of earlier ones lie.
    os.environ[_UNSHARED] = "1"
    parameters = RendezvousParameters(
        backend="c10d", endpoint=f"{job.master_addr}:{job.master_port}", run_id=job.run_id,
        min_nodes=elastic.min_nodes, max_nodes=elastic.max_nodes, **_host_of(job),
    )  # fmt: skip
    try:
        backend, store = create_backend(parameters)
    except RendezvousError as error:
        raise LaunchError(
            f"host {job.host} cannot reach the rendezvous at {job.master_addr}:{job.master_port}: "
            f"{error.__cause__ or error}; check --master_addr, --master_port and the firewall"
        ) from error
    timeouts = RendezvousTimeout(timedelta(seconds=JOIN_S), timedelta(seconds=LAST_CALL_S), timedelta(seconds=CLOSE_S))
    made = ElasticRendezvous.from_backend(
        job.run_id, store, backend, elastic.min_nodes, elastic.max_nodes, _own_address(job), timeouts,
        keep_alive_interval=KEEP_ALIVE_S, keep_alive_max_attempt=KEEP_ALIVE_TIMES,
    )  # fmt: skip
    made.notes = notes
    return made


def _host_of(job: HostJob) -> dict[str, Any]:
    """Whether this process holds the store: the first host of a known list; else torch compares addresses."""
    return {"is_host": job.host_rank == 0} if len(job.hosts) > 1 else {}


def _own_address(job: HostJob) -> str:
    """The address of this host as hosts see it that reach the rendezvous."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((job.master_addr, job.master_port or 1))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return job.host


def read_note(folder: Path | None, name: str) -> str:
    """What the ranks have said; empty where they have not."""
    if folder is None:
        return ""
    try:
        return (folder / name).read_text()
    except OSError:
        return ""


class ElasticHostAgent(HostAgent):
    """Runs the ranks of this host round after round.

    Args:
        job: this host's part of the job.
        notes: a folder in which ranks and agent leave each other notes.
    """

    def __init__(self, spec: WorkerSpec, job: HostJob, *, log_dir: Path, failure_dir: Path, notes: Path) -> None:
        super().__init__(spec, log_dir=log_dir, failure_dir=failure_dir)
        self._job, self._notes = job, notes
        self._progress_at_failure = ""

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
        first = worker_group.workers[0]
        log.info(
            "%s: round with %s hosts and %d ranks", self._job.host, worker_group.group_world_size, first.world_size
        )
        start = super()._start_workers
        return start(worker_group)  # pyright: ignore[reportCallIssue] - torch's decorator hides the signature

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        (self._notes / RESTARTING).touch()  # before they are asked to end: their memory is enough
        restart = super()._restart_workers
        restart(worker_group)  # pyright: ignore[reportCallIssue] - as above

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
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
