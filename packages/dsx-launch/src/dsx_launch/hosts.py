"""Starts the agents of several hosts and ends them all together.

One failing host ends the job. The other hosts get a moment to end by themselves (their agents are told, see
`dsx_launch.news`); then their connections are closed; then the local clients are killed. Nothing on a remote host is
ever killed by name.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from dsx_core.open_files import HOW_TO_RAISE, allow_many, open_now

from .errors import LaunchError
from .exit_codes import RESUME_EXIT_CODE
from .failures import shell_code, signal_name
from .plan import HostsPlan
from .processes import adopt_orphans, dying_with_parent, kill_descendants
from .runners import Command
from .runners.base import HOSTS_FILE, statements
from .runners.ssh import WINDOW

log = logging.getLogger("dsx.launcher")

STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)  # codes of an agent that was stopped because another host failed
OWN_END_S = 4.0  # for the other hosts to end by themselves after one has failed
NO_CONNECTION = 255  # how ssh ends when it could not connect, or lost its connection
CONNECT_S = 60.0  # from the start of a client to its connection
FORCED_END_S = 5.0  # from the request to stop to the kill
SAVED_END_S = 35.0  # for the other hosts to end after one has ended with RESUME_EXIT_CODE: they have saved too
SPARE_FILES = 64  # beside the pipes: libraries, and what a starting process needs for a moment
REQUESTED_END_S = 35.0  # the same after Ctrl-C: the ranks may be writing a checkpoint


class Clients:
    """The local client processes (ssh, pdsh, mpirun, srun), one per host or one for all hosts.

    Clients of single hosts are started in their order, with at most `WINDOW` of them on the way to a connection at the
    same time. One that is not connected after `CONNECT_S` seconds is ended, and counts as ended with
    `NO_CONNECTION`.
    """

    def __init__(self, commands: Sequence[Command], environ: Mapping[str, str]) -> None:
        allow_pipes(sum(command.lifeline for command in commands))
        self._commands, self._environ = commands, environ
        self._to_start = deque(range(len(commands)))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._connecting: dict[int, float] = {}
        self._codes: dict[int, int] = {}
        self._start_some()

    def poll(self) -> int | None:
        """The exit code if a client has failed; 0 if all have ended without a failure; None while they run. Starts
        those whose turn it is, unless one has failed.
        """
        self._watch()
        if self.code:
            self._to_start.clear()
        self._start_some()
        return self.code or (0 if self.all_ended else None)

    def _watch(self) -> None:
        """Notice clients that are connected or have ended."""
        for index, process in self._processes.items():
            if index not in self._codes and process.poll() is not None:
                self._connecting.pop(index, None)
                self._codes[index] = process.returncode
                _explain(self._commands[index], process.returncode)
        now = time.monotonic()
        for index, since in list(self._connecting.items()):
            if is_connected(self._processes[index]):
                del self._connecting[index]
            elif now - since >= CONNECT_S:
                del self._connecting[index]
                self._give_up(index)

    def _give_up(self, index: int) -> None:
        _kill(self._processes[index])
        self._processes[index].wait()
        self._codes[index] = NO_CONNECTION
        log.error("host %s: no connection within %g s", self._commands[index].host, CONNECT_S)

    def _start_some(self) -> None:
        while self._to_start and len(self._connecting) < WINDOW:
            index = self._to_start.popleft()
            self._processes[index] = start_client(self._commands[index], self._environ)
            if self._commands[index].lifeline:
                self._connecting[index] = time.monotonic()

    @property
    def code(self) -> int:
        """0, or the largest code of the hosts that failed by themselves: the host of the first failure ends with that
        rank's code, other hosts with 1. `RESUME_EXIT_CODE` only if no host failed, because then all ranks have saved.
        """
        own = [code for code in self._codes.values() if code not in (0, *STOPPED)]
        failed = [code for code in own if code != RESUME_EXIT_CODE]
        return max((shell_code(code) for code in failed or own or self._codes.values()), default=0)

    @property
    def all_ended(self) -> bool:
        return not self._to_start and len(self._codes) == len(self._processes)

    def wait_all(self, seconds: float) -> bool:
        """Whether all have ended within ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.poll()
            if self.all_ended:
                return True
            time.sleep(0.05)
        return False

    def tell_to_stop(self, number: signal.Signals) -> None:
        """Start no more clients. Close the standard input of the others, which ends the remote agents; send a signal to
        clients without such a pipe.
        """
        self._to_start.clear()
        self._connecting.clear()
        for index, process in self._processes.items():
            if process.poll() is not None:
                continue
            if self._commands[index].lifeline and process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
            else:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def kill(self) -> None:
        self._to_start.clear()
        for process in self._processes.values():
            if process.poll() is None:
                _kill(process)


def _kill(client: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(client.pid, signal.SIGKILL)


def is_connected(client: subprocess.Popen[bytes]) -> bool:
    """Whether the client has read what `start_client` wrote to it: ssh reads its input once it has a session."""
    if client.stdin is None or client.stdin.closed:
        return True
    return int.from_bytes(fcntl.ioctl(client.stdin, termios.FIONREAD, bytes(4)), sys.byteorder) == 0


def allow_pipes(hosts: int) -> None:
    """Raise the limit of open files if the pipes to so many hosts need that.

    Raises:
        LaunchError: the hard limit is too low.
    """
    needed = hosts + SPARE_FILES + open_now()
    limit = allow_many(needed)
    if 0 <= limit < needed:
        raise LaunchError(
            f"open files: got a hard limit of {limit}, expected at least {needed} for the connections to {hosts} hosts."
            f" Raise it where the launcher is started {HOW_TO_RAISE}, or use --launcher slurm or openmpi, which need no"
            " connection of the launcher to each host"
        )


def start_client(command: Command, environ: Mapping[str, str], stdout: int | None = None) -> subprocess.Popen[bytes]:
    """Start the local client process of a host, or of all hosts."""
    with _hosts_file(command.hosts_file) as (path, files):
        process = subprocess.Popen(
            _with_path(command.argv, path) if path else command.argv,
            env={**environ, **command.env},
            stdin=subprocess.PIPE if command.lifeline else subprocess.DEVNULL,
            stdout=stdout,
            start_new_session=True,  # so Ctrl-C reaches only the launcher, which ends the job in order
            preexec_fn=dying_with_parent(signal.SIGTERM),
            pass_fds=files,
        )
    if process.stdin is not None:
        with suppress(OSError):  # it has ended already, which is noticed
            # Without variables one byte, which the agent ignores: that it is read says that there is a connection.
            process.stdin.write(os.fsencode(statements(command.exports)) or b"\n")
            process.stdin.flush()
    return process


@contextmanager
def _hosts_file(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The path of a file with this text, for a process that gets these file descriptors; "" and none without a text.

    The file is memory that the process inherits: it ends with it, and nobody has to remove it.
    """
    if not text:
        yield "", ()
        return
    file = os.memfd_create("hosts")
    try:
        with os.fdopen(file, "w", closefd=False) as stream:
            stream.write(text)
        yield f"/proc/self/fd/{file}", (file,)
    finally:
        os.close(file)


def _with_path(argv: Sequence[str], path: str) -> list[str]:
    """The words with the path in the place of the first `HOSTS_FILE`; the user's words stand behind it."""
    place = next(at for at, word in enumerate(argv) if word.lstrip("^") == HOSTS_FILE)
    return [*argv[:place], argv[place].replace(HOSTS_FILE, path), *argv[place + 1 :]]


def _explain(command: Command, returncode: int) -> None:
    if returncode == NO_CONNECTION and command.argv[0] == "ssh":
        log.error(
            "host %s: ssh ended with 255: no connection, or it was lost; try: ssh %s true", command.host, command.host
        )
    elif returncode < 0:
        log.error("%s was killed by %s", command.host or command.argv[0], signal_name(-returncode))


def run_hosts(plan: HostsPlan, environ: Mapping[str, str], restarts: int = 0) -> int:
    """Start every host's agent and wait for the end; end all if one fails or on a signal. Returns the exit code.

    Args:
        restarts: how often all hosts are started again when they end with `RESUME_EXIT_CODE`, unless this process was
            asked to end.
    """
    adopt_orphans()
    asked: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        del frame
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, remember)
    for left in range(restarts, -1, -1):
        code = _run_once(plan, environ, asked)
        if code != RESUME_EXIT_CODE or asked or not left:
            return code
        log.info("the ranks of all hosts have saved and ended; starting them again (%d restarts left)", left - 1)
    return code


def _run_once(plan: HostsPlan, environ: Mapping[str, str], asked: list[int]) -> int:
    """One start of all hosts; `asked`: signals that ask this process to end, as they come."""
    log.info(
        "%d hosts through %s, rendezvous at %s:%d",
        len(plan.remote.hosts),
        plan.launcher,
        plan.master_addr,
        plan.master_port,
    )
    clients = Clients(plan.commands, environ)
    code = None
    while code is None and not asked:
        time.sleep(0.05)
        code = clients.poll()
    if code == 0:
        return 0
    if code is None:
        stop_on_request(plan, clients, asked)
        return RESUME_EXIT_CODE if clients.code == RESUME_EXIT_CODE else 128 + asked[0]
    if not clients.wait_all(SAVED_END_S if code == RESUME_EXIT_CODE else OWN_END_S):
        _end(plan, clients, signal.SIGTERM, FORCED_END_S)
    clients.kill()
    kill_descendants()
    return clients.code


def stop_on_request(plan: HostsPlan, clients: Clients, asked: list[int]) -> None:
    """End all hosts after a signal; a second signal ends them at once."""
    log.info("stopping all hosts: %s", signal_name(asked[0]))
    _end(plan, clients, signal.Signals(asked[0]), REQUESTED_END_S, until=lambda: len(asked) > 1)
    clients.kill()
    kill_descendants()


def _end(plan: HostsPlan, clients: Clients, number: signal.Signals, seconds: float, until=lambda: False) -> None:
    deadline = time.monotonic() + seconds
    if plan.launcher == "pdsh" and announce_end(plan) and clients.wait_all(FORCED_END_S):
        return
    clients.tell_to_stop(number)
    while time.monotonic() < deadline and not until() and not clients.wait_all(0.1):
        continue


def announce_end(plan: HostsPlan) -> bool:
    """Tell the agents through the rendezvous that the job ends, because pdsh does not pass signals on. Returns whether
    the rendezvous could be reached.
    """
    from .rendezvous import STORE_ERRORS, FailureBoard, Meeting  # lazy import: imports torch

    meeting = Meeting(plan.run_id, plan.remote.hosts, host_rank=0, addr=plan.master_addr, port=plan.master_port)
    try:
        FailureBoard(meeting, plan.master_port).announce()
        return True
    except STORE_ERRORS as error:
        log.debug("the rendezvous does not answer: %s", error)
        return False
