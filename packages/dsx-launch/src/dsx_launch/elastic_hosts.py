"""The hosts of an elastic job, reached by ssh: one that is lost does not end the others, and is tried again.

Left out: everything about the rounds, which the agents on the hosts agree on by themselves (`elastic.py`). The first
host holds their rendezvous: when it is lost, the job ends.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from .exit_codes import RESUME_EXIT_CODE
from .hosts import NO_CONNECTION, Clients, stop_on_request
from .plan import HostsPlan
from .processes import adopt_orphans, kill_descendants
from .runners import Command

log = logging.getLogger("dsx.launcher")

TRY_AGAIN_S = 30.0
_LEFT = (RESUME_EXIT_CODE, 128 + signal.SIGTERM, 128 + signal.SIGINT)


class ElasticClients(Clients):
    """The ssh clients of hosts that come and go."""

    def __init__(
        self, commands: Sequence[Command], environ: Mapping[str, str], try_again_s: float = TRY_AGAIN_S
    ) -> None:
        super().__init__(commands, environ)
        self._try_again_s = try_again_s
        self._lost: dict[int, float] = {}

    def look(self) -> bool:
        """Notice hosts that have ended, start lost ones again when it is time. Returns whether all have ended."""
        known = set(self._codes)
        self._watch()
        now = time.monotonic()
        for index in set(self._codes) - known:
            code, host = self._codes[index], self._commands[index].host
            if code == NO_CONNECTION and index != 0:
                self._lost[index] = now
                log.warning("host %s is lost; it is tried again in %g s", host, self._try_again_s)
            elif code in _LEFT:
                log.info("host %s has left", host)
        for index, since in list(self._lost.items()):
            if now - since >= self._try_again_s and not self._others_ended(index):
                del self._lost[index], self._codes[index], self._processes[index]
                self._to_start.append(index)
        self._start_some()
        return self.all_ended

    def _others_ended(self, index: int) -> bool:
        return len(self._codes.keys() | {index}) == len(self._commands)

    @property
    def outcome(self) -> int:
        """0 if a host has ended well: then the job has, and hosts that were lost on the way do not count."""
        return 0 if 0 in self._codes.values() else self.code


def run_elastic_hosts(plan: HostsPlan, environ: Mapping[str, str]) -> int:
    """Start every host's agent and wait until the job has ended. Returns the exit code."""
    adopt_orphans()
    log.info("%d hosts, rendezvous at %s:%d", len(plan.remote.hosts), plan.master_addr, plan.master_port)
    asked: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        del frame
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, remember)
    clients = ElasticClients(plan.commands, environ)
    while not asked and not clients.look():
        time.sleep(0.05)
    if asked:
        stop_on_request(plan, clients, asked)
        return RESUME_EXIT_CODE if clients.code == RESUME_EXIT_CODE else 128 + asked[0]
    kill_descendants()
    return clients.outcome
