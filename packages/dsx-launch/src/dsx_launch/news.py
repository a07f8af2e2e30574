"""Ends all hosts when one fails: hosts post their failures, watch for failures of others, and agree which is shown.

However the hosts were started (ssh, mpirun, by hand on each host), every agent looks at the store of the first host
once a second. If another host has failed, or the store is gone, the agent stops itself as a user would: with SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from .failures import RankFailure
from .rendezvous import STORE_ERRORS, FailureBoard, HostRendezvous, Meeting

if TYPE_CHECKING:
    from .agent import HostAgent

log = logging.getLogger("dsx.launcher")

LOOK_EVERY_S = 1.0
LEAVE_S = 30.0  # how long the first host waits for the ranks of the other hosts to end
OWN_STORY_S = (
    0.5  # between hearing the news and stopping: a rank of this host may be the cause and is about to be noticed
)


class NoWatch:
    """The watch of a job on one host: there are no other hosts to watch."""

    def announce(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class FailureWatch:
    """A daemon thread that stops this host's agent when another host has failed."""

    def __init__(self, rendezvous: HostRendezvous, agent: HostAgent) -> None:
        self._rendezvous, self._agent = rendezvous, agent
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="dsx-failure-watch", daemon=True)
        self._thread.start()

    def announce(self) -> None:
        """Tell the other hosts that a rank of this one has failed."""
        try:
            FailureBoard(self._rendezvous.meeting, self._rendezvous.port).announce()
        except STORE_ERRORS:
            log.debug("the first host is gone; nobody to tell")

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        self._done.set()

    def _look(self) -> None:
        while self._rendezvous.port == 0:
            if self._done.wait(LOOK_EVERY_S):
                return
        try:
            board = FailureBoard(self._rendezvous.meeting, self._rendezvous.port)
            while not board.announced():
                if self._done.wait(LOOK_EVERY_S):
                    return
        except STORE_ERRORS:
            if self._done.wait(2 * LOOK_EVERY_S):  # the job may be ending normally, and the first host left before us
                return
        if not self._done.wait(OWN_STORY_S):
            self._agent.hurry = True
            os.kill(os.getpid(), signal.SIGTERM)


def watch_for_failures(rendezvous: HostRendezvous, agent: HostAgent) -> FailureWatch | NoWatch:
    """Start watching the other hosts, if there are any."""
    return FailureWatch(rendezvous, agent) if len(rendezvous.meeting.hosts) > 1 else NoWatch()


def leave_together(rendezvous: HostRendezvous) -> None:
    """Tell the other hosts that the ranks of this host have saved and ended. The first host waits for all hosts,
    because the ranks' store lives in its agent, and ranks that are still ending need it.
    """
    meeting = rendezvous.meeting
    if len(meeting.hosts) == 1:
        return
    deadline = time.monotonic() + LEAVE_S
    try:
        board = FailureBoard(meeting, rendezvous.port)
        board.note_saved()
        while meeting.host_rank == 0 and not board.all_saved() and time.monotonic() < deadline:
            time.sleep(0.1)
    except STORE_ERRORS:
        log.debug("the first host is gone already")


def cause_of_the_job(meeting: Meeting, port: int, own: RankFailure, *, wait_s: float) -> RankFailure:
    """The first failure of all hosts, among those posted within ``wait_s`` seconds; ``own`` if the store cannot be
    reached.
    """
    try:
        board = FailureBoard(meeting, port)
        board.post(own)
        time.sleep(wait_s)
        cause = board.first_cause()
        if meeting.host_rank == 0:
            time.sleep(0.5)  # keep the store a little longer for the other hosts
    except STORE_ERRORS:
        return own
    return cause
