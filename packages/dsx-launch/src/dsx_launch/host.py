"""Runs the ranks of one host and reports how they ended. ``dsx launch`` does this on one machine, and starts a process
that does it on each of several hosts.

The result is an exit code for a shell: 0, the code of the rank that failed first, 128 + n for a signal, or
`RESUME_EXIT_CODE` if the ranks were asked to end and have saved.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsx_core.holding import Hold, hold, remove_if_free

from .errors import LaunchError
from .exit_codes import RESUME_EXIT_CODE
from .failures import RankFailure, first_cause, read_records, render, shell_code, signal_name
from .output import SHOW_ALL, Output, RankOutput
from .processes import adopt_orphans, kill_descendants

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from .rendezvous import Meeting

log = logging.getLogger("dsx.launcher")

WORKER = Path(__file__).with_name("_worker.py")
WORKER_SPEC_VARIABLE = "DSX_WORKER"
_FOLDER = "dsx_launch_"
NEWS_WAIT_S = 1.5  # how long a failed host waits for failures of other hosts, one of which may have come first


@dataclass(frozen=True)
class Program:
    """The program that every rank runs: ``kind`` is "script", "module" (python -m) or "program" (any executable)."""

    target: str
    args: tuple[str, ...] = ()
    kind: str = "script"
    pass_local_rank: bool = True


@dataclass(frozen=True)
class HostJob:
    """One host's part of a job. ``devices`` None: the ranks own none; ``cores``: one tuple per local rank, or empty."""

    program: Program
    procs: int
    hosts: tuple[str, ...] = ("localhost",)
    host_rank: int = 0
    devices: tuple[str, ...] | None = None
    cores: tuple[tuple[int, ...], ...] = ()
    log_dir: str = ""
    output: Output = SHOW_ALL
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    run_id: str = "dsx"

    @property
    def host(self) -> str:
        return self.hosts[self.host_rank]

    def attempt(self, number: int) -> HostJob:
        """The same part of the job, for the n-th restart. Hosts that restart by themselves use another port each time,
        so that none of them takes part in an old rendezvous.
        """
        moves = self.master_port and len(self.hosts) > 1
        return replace(self, master_port=self.master_port + number) if moves else self


def check_program(program: Program) -> None:
    """Refuse a missing script before any process is started."""
    if program.kind == "script" and not os.path.exists(program.target):
        raise LaunchError(
            f"no such script: {program.target} (in {os.getcwd()}); pass a path, or --module for a module name"
        )


def run_host(job: HostJob, restarts: int = 0) -> int:
    """Start the ranks of this host, wait for the end of the job, report the first failure, and leave no process behind.
    Returns the exit code.

    Args:
        restarts: how often ranks that end with `RESUME_EXIT_CODE` are started again, unless this process was asked to
            end.
    """
    check_program(job.program)
    check_log_dir(job.log_dir)
    adopt_orphans()
    remove_leftovers()
    for left in range(restarts, -1, -1):
        with job_folder() as folder:
            code, stopped = _run_in(job.attempt(restarts - left), folder)
        if code != RESUME_EXIT_CODE or stopped or not left:
            return code
        log.info("%s: the ranks have saved and ended; starting them again (%d restarts left)", job.host, left - 1)
    return code


class JobFolder:
    """A temporary folder for messages between agent and ranks, held while this process lives. Cleaners of temporary
    folders may take it away from a long job: `renew` makes it again.
    """

    def __init__(self) -> None:
        self.path, self._hold = _new_folder()
        self._parts: list[Path] = []

    def part(self, name: str) -> Path:
        """A folder in it, made if it is not there."""
        path = self.path / name
        path.mkdir(exist_ok=True)
        self._parts.append(path)
        return path

    def renew(self) -> bool:
        """Make the folder again, under another name, if it or a part of it is lost. Returns whether it was."""
        if all(path.is_dir() for path in (self.path, *self._parts)):
            return False
        log.warning("%s was removed by another program; the job goes on with a new folder", self.path)
        self.remove()
        self.path, self._hold = _new_folder()
        self._parts.clear()
        return True

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._hold.release()


def _new_folder() -> tuple[Path, Hold]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_FOLDER))
        with suppress(FileNotFoundError):  # another launcher's clean-up came between
            return path, hold(path)


@contextmanager
def job_folder() -> Iterator[JobFolder]:
    """A `JobFolder` for the time of the context."""
    folder = JobFolder()
    try:
        yield folder
    finally:
        folder.remove()


def check_log_dir(path: str) -> None:
    """Make the folder for the ranks' logs, if one is asked for. Raises `LaunchError` if that is impossible."""
    if not path:
        return
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--enable_each_rank_log {path}: the folder cannot be made: {error.strerror}") from error


def remove_leftovers() -> None:
    """Remove the temporary folders of launchers that were killed: nobody holds them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        remove_if_free(folder)


def _run_in(job: HostJob, folder: JobFolder) -> tuple[int, bool]:
    """The exit code, and whether this process was asked to end."""
    # Lazy import: torch takes seconds, which --help and a mistake in the options should not need.
    from torch.distributed.elastic.multiprocessing import SignalException

    from .agent import HostAgent
    from .news import leave_together, watch_for_failures
    from .rendezvous import HostRendezvous

    quiet_elastic()
    failure_dir = folder.part("failures")
    rendezvous = HostRendezvous(_meeting(job))
    output = RankOutput(job.output, folder.part("output"), job.log_dir)
    agent = HostAgent(
        worker_spec(job, rendezvous), log_dir=folder.path / "elastic", failure_dir=failure_dir, output=output
    )
    os.environ[WORKER_SPEC_VARIABLE] = json.dumps(rank_settings(job, failure_dir, output))
    watch = watch_for_failures(rendezvous, agent)
    agent.on_failure = watch.announce
    stopped_by: int | None = None
    failed = True
    try:
        failed = agent.run_once()
    except SignalException as error:
        stopped_by = int(error.sigval)
    except KeyboardInterrupt:  # before the ranks were started; from then on the agent handles signals
        stopped_by = int(signal.SIGINT)
    finally:
        watch.close()
        if failed:
            ignore_signals()
            kill_descendants()
        output.close()
    failures = collect(job, agent.failed, failure_dir)
    if agent.can_resume and not failures:
        log.info("%s: the ranks have saved and ended, and can be resumed (exit code %d)", job.host, RESUME_EXIT_CODE)
        leave_together(rendezvous)
        return RESUME_EXIT_CODE, stopped_by is not None
    if stopped_by is not None and not (failures and agent.hurry):
        return _conclude_stop(job, stopped_by, failed_elsewhere=agent.hurry), True
    return (_conclude(job, rendezvous.port, failures) if failed else 0), False


def _meeting(job: HostJob) -> Meeting:
    from .rendezvous import Meeting  # lazy import, as above

    return Meeting(
        run_id=job.run_id, hosts=job.hosts, host_rank=job.host_rank, addr=job.master_addr, port=job.master_port
    )


def worker_spec(job: HostJob, rendezvous: RendezvousHandler, restarts: int = 0) -> WorkerSpec:
    """The program for torch's agent, and how often it is restarted after a failure."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    # The agent substitutes $-macros in arguments; a doubled $ comes out as the one the user wrote.
    args = tuple(arg.replace("$", "$$") for arg in ("-u", str(WORKER), job.program.target, *job.program.args))
    return WorkerSpec(
        role="dsx",
        local_world_size=job.procs,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=args,
        max_restarts=restarts,
        monitor_interval=0.1,
    )


def rank_settings(job: HostJob, failure_dir: Path, output: RankOutput) -> dict[str, object]:
    """The settings for `_worker.py`, in addition to the variables that the agent sets."""
    return {
        "agent_pid": os.getpid(),
        "kind": job.program.kind,
        "pass_local_rank": job.program.pass_local_rank,
        "devices": job.devices,
        "cores": job.cores,
        "log_dir": job.log_dir,
        "pipes": str(output.folder) if job.output.piped else "",
        "shown": job.output.local_ranks,
        "failure_dir": str(failure_dir),
    }


def quiet_elastic() -> None:
    """Silence the agent's own log, which repeats the report; --log_level debug shows it."""
    wanted = logging.DEBUG if log.isEnabledFor(logging.DEBUG) else logging.CRITICAL
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(wanted)


def ignore_signals() -> None:
    """Ignore signals during the clean-up, so that a second Ctrl-C does not interrupt it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def collect(job: HostJob, failed: dict[int, tuple[int, int]], failure_dir: Path) -> list[RankFailure]:
    """The ranks that failed by themselves: those that reported an exception, and those that died without a report."""
    found = read_records(failure_dir, host=job.host)
    reported = {failure.rank for failure in found}
    now = time.time()
    silent = [
        RankFailure(rank=rank, host=job.host, time=now, exitcode=code, pid=pid)
        for rank, (code, pid) in failed.items()
        if rank not in reported
    ]
    return found + silent


def _conclude_stop(job: HostJob, number: int, *, failed_elsewhere: bool) -> int:
    """The exit code after the ranks were stopped from outside, by a signal or because another host has failed."""
    log.log(logging.DEBUG if len(job.hosts) > 1 else logging.INFO, "%s: stopped by %s", job.host, signal_name(number))
    if failed_elsewhere and job.host_rank == 0:
        time.sleep(
            2 * NEWS_WAIT_S
        )  # the rendezvous lives in this process: the failed host is still asking it who failed first
    return 1 if failed_elsewhere else 128 + number


def _conclude(job: HostJob, port: int, failures: Sequence[RankFailure]) -> int:
    """Print the report if this host has the first failure of the job; return the exit code."""
    cause = first_cause(failures)
    if cause is None:
        log.error("the ranks of %s could not be run", job.host)
        return 1
    if len(job.hosts) > 1:
        from .news import cause_of_the_job

        of_job = cause_of_the_job(_meeting(job), port, cause, wait_s=NEWS_WAIT_S)
        if of_job.rank != cause.rank:
            log.info("rank %d on %s failed after rank %d: %s", cause.rank, job.host, of_job.rank, cause.reason)
            return shell_code(cause.exitcode)
    others = [failure for failure in failures if failure.rank != cause.rank]
    sys.stdout.flush()
    sys.stderr.write(render(cause, others))
    sys.stderr.flush()
    return shell_code(cause.exitcode)
