"""The launcher's end of the process that forks ranks (`_stand_by.py`), and the ranks that come from it.

Left out: when ranks are started and ended, which is the agent's affair.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .host import WORKER, HostJob

__all__ = ["AdoptedRank", "FreshRanks", "RankSource", "StandBy", "ranks_from", "stand_by_for"]

log = logging.getLogger("dsx.launcher")

_PROGRAM = Path(__file__).with_name("_stand_by.py")
_READY_S = 120.0  # importing torch on a busy machine; nobody waits so long where it is quicker from nothing
_ANSWER_S = 60.0
_LOOK_EVERY_S = 0.01
_MAKER = "get_subprocess_handler"


class RankSource(Protocol):
    """What starts a rank's process."""

    def spawn(self, argv: Sequence[str], env: Mapping[str, str]) -> AdoptedRank | None:
        """Start a rank; None: it has to be started as a fresh process."""
        ...

    def close(self) -> None:
        """No rank will be started any more."""
        ...


class FreshRanks:
    """Every rank is a fresh process."""

    def spawn(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """See `RankSource`."""

    def close(self) -> None:
        """Nothing to end."""


class AdoptedRank:
    """A rank that was forked by another process and has become a child of this one. The part of `subprocess.Popen`
    that torch's agent uses.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code as `subprocess` gives it; None while the rank runs."""
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it: how it ended is lost
                self.returncode = 1
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank with process id {self.pid}", timeout or 0.0)
            time.sleep(_LOOK_EVERY_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the rank has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class StandBy:
    """The process that has everything loaded. Ranks that it cannot start are started as fresh processes; why not is
    said once.

    Args:
        process: it.
        channel: the socket on which it answers.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process, self._channel = process, channel
        self._said = channel.makefile("rw", encoding="ascii")
        self._works: bool | None = None  # None: it has not told yet

    @staticmethod
    def start(job: HostJob) -> StandBy:
        """Start it for the ranks of a host; returns at once."""
        ours, theirs = socket.socketpair()
        settings = {
            "socket": theirs.fileno(), "agent_pid": os.getpid(), "kind": job.program.kind, "procs": job.procs,
            "cores": job.cores,
        }  # fmt: skip
        command = [sys.executable, "-u", str(_PROGRAM), job.program.target, *job.program.args]
        env = {**os.environ, "DSX_STAND_BY": json.dumps(settings)}
        with theirs:
            process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], start_new_session=True)
        return StandBy(process, ours)

    def spawn(self, argv: Sequence[str], env: Mapping[str, str]) -> AdoptedRank | None:
        """See `RankSource`. Waits until the process has loaded everything."""
        if tuple(argv[:3]) != (sys.executable, "-u", str(WORKER)) or not self._is_ready():
            return None
        told = self._ask({"argv": list(argv[2:]), "env": dict(env)})
        if "pid" in told:
            return AdoptedRank(told["pid"])
        self._give_up(told["problem"])
        return None

    def _is_ready(self) -> bool:
        if self._works is None:
            self._works = True
            self._channel.settimeout(_READY_S)
            told = self._hear()
            log.debug("the stand-by process has loaded torch and dsx in %.1f s", told.get("seconds", 0.0))
            if told["problem"]:
                self._give_up(told["problem"])
            self._channel.settimeout(_ANSWER_S)
        return self._works

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._said.write(json.dumps(request) + "\n")
            self._said.flush()
        except OSError as error:
            return {"problem": f"the stand-by process is gone ({error.strerror})"}
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        try:
            line = self._said.readline()
        except OSError as error:
            return {"problem": f"the stand-by process does not answer ({error})"}
        return json.loads(line) if line.endswith("\n") else {"problem": "the stand-by process has ended"}

    def _give_up(self, problem: str) -> None:
        log.warning("%s; ranks are started as fresh processes, which takes seconds longer", problem)
        self._works = False
        self.close()

    def close(self) -> None:
        """End the process. Its ranks go on."""
        with contextlib.suppress(OSError):  # what was not sent is of no use any more
            self._said.close()
        self._channel.close()
        self._process.kill()
        self._process.wait()


def stand_by_for(job: HostJob, wanted: bool) -> RankSource:
    """What starts the ranks of a host: a stand-by process where there can be one."""
    if wanted and sys.platform.startswith("linux") and job.program.kind != "program":
        return StandBy.start(job)
    return FreshRanks()


@contextlib.contextmanager
def ranks_from(source: RankSource) -> Iterator[None]:
    """Let torch's agent take its ranks from `source` while this is open.

    The agent makes processes by a function of a module, and takes no other: it is exchanged for the time of the call.
    """
    from torch.distributed.elastic.multiprocessing import api  # lazy import: seconds

    known = getattr(api, _MAKER)
    setattr(api, _MAKER, functools.partial(_handler_class(), source))
    try:
        yield
    finally:
        setattr(api, _MAKER, known)


@functools.cache
def _handler_class() -> type:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler  # late: seconds

    class Handler(SubprocessHandler):
        """Asks a `RankSource` first."""

        def __init__(self, source: RankSource, **arguments: Any) -> None:
            self._source = source
            super().__init__(**arguments)

        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            redirected = self._stdout or self._stderr
            rank = None if redirected else self._source.spawn(args, env)
            return super()._popen(args, env) if rank is None else rank

    return Handler
