"""The rendezvous of the hosts of a job: a TCP store on the first host, whose address is known before the start. It
listens at that address only (`dsx_launch.listening`), and holds JSON and texts.

The rank of a host is its place in the list of hosts, not its order of arrival. On one machine the kernel chooses a free
port for the store, so that several jobs cannot collide. Between hosts the port must be known beforehand. An error names
the hosts that did not arrive.

The same store is used for failures: an agent that sees a rank fail posts it, the other agents look once a second, and
the host with the first failure prints it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import (
    DistNetworkError,
    DistStoreError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]  public, but not in __all__
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from .errors import LaunchError
from .failures import RankFailure, from_json, to_json
from .listening import store_at

_STORE_ERRORS = (
    DistNetworkError,
    DistStoreError,
    RuntimeError,
)  # a lost connection surfaces as any of these, by torch version
_FAILED = "dsx/failed"
REQUESTS_PER_S = 1_000  # of all hosts together to the store, while some wait for others
NAMED = 16  # hosts in a message


@dataclass(frozen=True)
class Meeting:
    """The place of the rendezvous. ``port`` 0: any free port (for one host only)."""

    run_id: str
    hosts: tuple[str, ...]
    host_rank: int
    addr: str
    port: int
    timeout_s: float = 300.0


class HostRendezvous(RendezvousHandler):
    """A rendezvous of a fixed set of hosts, for torch's elastic agent."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self._tcp: TCPStore | None = None

    def get_backend(self) -> str:
        return "dsx-hosts"

    @property
    def use_agent_store(self) -> bool:
        return True  # the ranks use the same store at MASTER_ADDR:MASTER_PORT

    @property
    def port(self) -> int:
        """The port in use; 0 before `next_rendezvous`."""
        return self._tcp.port if self._tcp is not None else 0

    def next_rendezvous(self) -> RendezvousInfo:
        meeting = self.meeting
        deadline = time.monotonic() + meeting.timeout_s
        if self._tcp is None:
            self._tcp = _connect(meeting, deadline)
        _wait_for_all(self._tcp, meeting, deadline)
        store = PrefixStore(meeting.run_id, self._tcp)
        where = RendezvousStoreInfo(meeting.addr, self._tcp.port)
        return RendezvousInfo(store, meeting.host_rank, len(meeting.hosts), where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing: the set of hosts is fixed."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.meeting.run_id

    def shutdown(self) -> bool:
        return True


def _connect(meeting: Meeting, deadline: float) -> TCPStore:
    """Open the store (on the first host) or connect to it (on the others), in short attempts, so that signals are
    handled in between.
    """
    if meeting.host_rank == 0:
        try:
            return store_at(meeting.addr, meeting.port, timedelta(seconds=meeting.timeout_s))
        except (OSError, *_STORE_ERRORS) as error:
            raise LaunchError(
                f"the rendezvous cannot listen on port {meeting.port} of {meeting.hosts[0]}: {_first_line(error)};"
                " choose another with --master_port"
            ) from error
    while True:
        try:
            return _client(meeting, meeting.port)
        except _STORE_ERRORS as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"host {meeting.hosts[meeting.host_rank]} cannot reach the first host at"
                    f" {meeting.addr}:{meeting.port}: {_first_line(error)}; check --master_addr, --master_port and the"
                    " firewall"
                ) from error
        time.sleep(0.2)


def _client(meeting: Meeting, port: int) -> TCPStore:
    return TCPStore(
        meeting.addr, port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False, multi_tenant=True
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _key(meeting: Meeting, name: str, host_rank: int) -> str:
    return f"{meeting.run_id}/dsx/{name}/{host_rank}"


def _wait_for_all(store: Store, meeting: Meeting, deadline: float) -> None:
    """Wait until every host has joined. The hosts are in one list, which only the first host reads, as the store is in
    its process. So the store gets one request of each host every now and then, however many are missing; and a host
    that joins twice, because its command was started again, counts once.
    """
    count = len(meeting.hosts)
    if count == 1:
        return
    joined, complete = f"{meeting.run_id}/dsx/joined", f"{meeting.run_id}/dsx/all_joined"
    store.append(joined, f"{meeting.host_rank},")  # pyright: ignore[reportAttributeAccessIssue] - not in the stubs
    while not (store.check([complete]) or (meeting.host_rank == 0 and _announced(store, joined, complete, count))):
        if time.monotonic() > deadline:
            found = _ranks_in(store, joined)
            names = [host for rank, host in enumerate(meeting.hosts) if rank not in found]
            if len(names) > NAMED:
                names[NAMED:] = [f"{len(names) - NAMED} more hosts"]
            raise LaunchError(
                f"rendezvous: {', '.join(names)} did not join within {meeting.timeout_s:.0f} s; is the job started on"
                " every host?"
            )
        time.sleep(max(0.1, count / REQUESTS_PER_S))


def _announced(store: Store, joined: str, complete: str, count: int) -> bool:
    """On the first host: whether all have joined; then the others are told."""
    if len(_ranks_in(store, joined)) < count:
        return False
    store.set(complete, "1")
    return True


def _ranks_in(store: Store, joined: str) -> set[int]:
    return {int(word) for word in store.get(joined).decode().split(",") if word}


class FailureBoard:
    """Failures of all hosts, read and posted over a separate connection, because a store connection does one blocking
    call at a time.
    """

    def __init__(self, meeting: Meeting, port: int) -> None:
        self._meeting = meeting
        self._store = _client(meeting, port)
        self._order = f"{meeting.run_id}/dsx/causes"

    def announce(self) -> None:
        """Tell every host that the job has failed or is to stop. Raises the store's error if the first host is gone."""
        self._store.set(f"{self._meeting.run_id}/{_FAILED}", "1")

    def announced(self) -> bool:
        """Whether a host has announced a failure or a stop. Raises the store's error if the first host is gone."""
        return bool(self._store.check([f"{self._meeting.run_id}/{_FAILED}"]))

    def post(self, cause: RankFailure) -> None:
        """Post the failure of this host. What decides which one is first goes into one list of all hosts."""
        self._store.set(_key(self._meeting, "cause", self._meeting.host_rank), to_json(cause))
        line = json.dumps([*cause.order, self._meeting.host_rank])
        self._store.append(self._order, f"{line}\n")  # pyright: ignore[reportAttributeAccessIssue] - as above
        self.announce()

    def note_saved(self) -> None:
        """Tell that the ranks of this host have saved and ended."""
        self._store.set(_key(self._meeting, "saved", self._meeting.host_rank), "1")

    def all_saved(self) -> bool:
        """Whether the ranks of every host have saved and ended."""
        return self._store.check([_key(self._meeting, "saved", rank) for rank in range(len(self._meeting.hosts))])

    def first_cause(self) -> RankFailure:
        """The first of the failures that hosts have posted so far: two requests, however many hosts have failed."""
        lines = self._store.get(self._order).decode().splitlines()
        *_, host_rank = min(json.loads(line) for line in lines)
        return from_json(self._store.get(_key(self._meeting, "cause", host_rank)).decode())


STORE_ERRORS = _STORE_ERRORS
