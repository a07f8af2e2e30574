"""The agent of one host: torch's elastic agent with firm times for stopping.

torch's agent starts the ranks, watches them and stops all ranks when one fails. This class adds: a rank that has
reported an exception counts as failed even if it hangs in its own clean-up; ranks that do not stop are killed after a
few seconds (torch waits 30); and it records which ranks failed by themselves, before the others were stopped. The
agent's own restarts are not used, because a job resumes from its checkpoint with the same command. A rank that ends
with `RESUME_EXIT_CODE` has not failed: all ranks were asked to end, and have saved.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext

from .exit_codes import RESUME_EXIT_CODE
from .output import RankOutput

STOP_AFTER_FAILURE_S = 3  # from SIGTERM to SIGKILL when another rank has failed
STOP_ON_REQUEST_S = 30  # the same if the user or the batch system asks for the stop: time to write a checkpoint
CLEAN_UP_S = 1.0  # a rank that has reported its exception may run its exit handlers this long


class HostAgent(LocalElasticAgent):
    """Runs the ranks of this host once. ``failure_dir`` is where the ranks report exceptions; ``output``: what shows
    their output.
    """

    stop_after_failure_s = STOP_AFTER_FAILURE_S

    def __init__(self, spec: WorkerSpec, *, log_dir: Path, failure_dir: Path, output: RankOutput) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(log_dir)))
        self._failure_dir, self._output = failure_dir, output
        self._reported_at: float | None = None
        self.failed: dict[int, tuple[int, int]] = {}
        """Global rank -> (exit code, pid) of ranks that failed by themselves."""
        self.exitcodes: dict[int, int] = {}
        """Global rank -> exit code of every rank that has ended."""
        self.on_failure: Callable[[], None] = lambda: None
        """Is called once, when the first failure is seen, before the other ranks are stopped."""
        self.hurry = False
        """Set when another host has failed. Ranks then get less time to stop."""

    def run_once(self) -> bool:
        """Start the ranks and wait for their end. Returns whether any failed; raises torch's `SignalException` when
        stopped.
        """
        result = cast(RunResult, self.run())
        return result.is_failed()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._output.begin({worker.local_rank: worker.global_rank for worker in worker_group.workers})
        start = super()._start_workers
        return start(worker_group)  # pyright: ignore[reportCallIssue] - torch's decorator hides the signature

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context = self._pcontext
        if isinstance(context, SubprocessContext) and self._has_failed(context):
            self.on_failure()
            context.close(signal.SIGTERM, timeout=self.stop_after_failure_s)
            self._note_exits(context)
        watched = super()._monitor_workers
        return watched(worker_group)  # pyright: ignore[reportCallIssue] - torch's decorator hides the signature

    def _has_failed(self, context: SubprocessContext) -> bool:
        self._note_exits(context)
        good = (0, RESUME_EXIT_CODE)
        self.failed.update({r: (code, self._pid(r)) for r, code in self.exitcodes.items() if code not in good})
        if self.failed:
            return True
        if self._reported_at is None and any(self._failure_dir.glob("rank*.json")):
            self._reported_at = time.monotonic()
        return self._reported_at is not None and time.monotonic() - self._reported_at > CLEAN_UP_S

    def _note_exits(self, context: SubprocessContext) -> None:
        for local_rank, handler in context.subprocess_handlers.items():
            code = handler.proc.poll()
            if code is not None:
                self.exitcodes[self._worker_group.workers[local_rank].global_rank] = code

    @property
    def can_resume(self) -> bool:
        """Whether the ranks have saved, and then ended or were ended."""
        codes = set(self.exitcodes.values())
        return RESUME_EXIT_CODE in codes and codes <= {RESUME_EXIT_CODE, -signal.SIGTERM, -signal.SIGKILL}

    def _pid(self, rank: int) -> int:
        workers = self._worker_group.workers
        return next((int(worker.id) for worker in workers if worker.global_rank == rank), 0)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = STOP_ON_REQUEST_S) -> None:
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout=self.stop_after_failure_s if self.hurry else timeout)
            if isinstance(self._pcontext, SubprocessContext):
                self._note_exits(self._pcontext)
        super()._shutdown(death_sig)
