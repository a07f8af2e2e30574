"""The rendezvous of an elastic job: torch's, with the rules that `elastic.py` names, and a shorter last call.

torch closes a round some seconds after its least number of hosts is there, because others may be on their way. Where
all hosts of the round before are back, and no host waits, nobody is on the way: the round begins at once.

A job on one host has its state in this process' memory. Between hosts it is JSON in a store (`elastic_state.py`). The
ranks of each round meet in a store of its own, which the agent of the first host serves.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]  public, but not in __all__
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _Action,
    _RendezvousContext,
    _RendezvousExitOp,
    _RendezvousJoinOp,
    _RendezvousOpExecutor,
)
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

from .elastic_settings import CLOSE_S, JOIN_S, KEEP_ALIVE_TIMES, LAST_CALL_S, STORE_S, Elastic
from .elastic_state import JsonState
from .errors import LaunchError
from .host import HostJob
from .listening import store_at

__all__ = ["ElasticRendezvous", "meet"]

log = logging.getLogger("dsx.launcher")

_UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
Operation = Callable[[_RendezvousContext, float], _Action]


class _WithoutLastCall(_RendezvousOpExecutor):
    """Runs torch's operations; a host that joins a round closes it as soon as `known` are all there.

    Args:
        executor: torch's.
    """

    def __init__(self, executor: _RendezvousOpExecutor) -> None:
        self._executor = executor
        self.known: frozenset[Any] = frozenset()
        """The hosts of the round before; empty: torch's last call decides."""

    def run(
        self,
        state_handler: Operation,
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        """See torch."""
        joins = isinstance(state_handler, _RendezvousJoinOp)
        operation = self._joining(state_handler) if joins and self.known else state_handler
        self._executor.run(operation, deadline, update_deadline)

    def _joining(self, join: Operation) -> Operation:
        def run(context: _RendezvousContext, deadline: float) -> _Action:
            action, state = join(context, deadline), context.state
            waits = action in (_Action.SYNC, _Action.KEEP_ALIVE) and not state.complete
            enough = len(state.participants) >= context.settings.min_nodes
            all_back = self.known <= set(state.participants) and not state.wait_list
            return _Action.MARK_RENDEZVOUS_COMPLETE if waits and enough and all_back else action

        return run


class ElasticRendezvous(DynamicRendezvousHandler):
    """torch's rendezvous, with a least time between two changes, a way to leave, and a store for each round."""

    least_time: Callable[[], float] = staticmethod(lambda: 0.0)
    """Seconds between two changes; the ranks say how many."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._op_executor = self._rounds = _WithoutLastCall(self._op_executor)

    def num_nodes_waiting(self) -> int:
        """The number of hosts that wait for a new round; 0 before `elasticity.min_time` is over."""
        waiting = super().num_nodes_waiting()
        return waiting if time.monotonic() - self._began >= self.least_time() else 0

    def next_rendezvous(self) -> Any:
        """See torch."""
        # torch gives later rounds the store of the first one, in which the addresses of ranks that are gone lie.
        self._bootstrap_store_info = self._shared_tcp_store_server = None
        found = super().next_rendezvous()
        self._began = time.monotonic()
        self._rounds.known = frozenset(self._state_holder.state.participants)
        return found

    _began = 0.0

    @property
    def round(self) -> int:
        """The number of the running round, the same on all hosts."""
        return int(self._state_holder.state.round)

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        try:
            return store_at(master_addr, master_port, timedelta(seconds=STORE_S))
        except OSError as error:
            raise LaunchError(f"the ranks' store cannot listen at {master_addr}: {error}") from error

    def leave(self) -> None:
        """Take this host out of the round, so that the others need not find out by its silence."""
        self._stop_heartbeats()
        try:
            self._op_executor.run(_RendezvousExitOp(), self._get_deadline(timedelta(seconds=CLOSE_S)))
        except RendezvousError as error:
            log.debug("the rendezvous does not answer: %s", error)


def meet(job: HostJob, elastic: Elastic) -> ElasticRendezvous:
    """This host's way into the rounds of a job. Raises `LaunchError` where the store does not answer."""
    os.environ.pop(_UNSHARED, None)  # the ranks would listen by themselves, at all interfaces
    store = _state_store(job)
    timeouts = RendezvousTimeout(timedelta(seconds=JOIN_S), timedelta(seconds=LAST_CALL_S), timedelta(seconds=CLOSE_S))
    state = JsonState(store, job.run_id, elastic.keep_alive_s)
    return ElasticRendezvous.from_backend(
        job.run_id, store, state, elastic.min_nodes, elastic.max_nodes, _own_address(job),
        timeouts, keep_alive_interval=elastic.keep_alive_s, keep_alive_max_attempt=KEEP_ALIVE_TIMES,
    )  # fmt: skip


def _state_store(job: HostJob) -> Store:
    """The store in which the agents meet. Without a port no other agent joins, and nothing listens."""
    if not job.master_port:
        return HashStore()
    timeout = timedelta(seconds=STORE_S)
    try:
        if _serves(job):
            try:
                return store_at(job.master_addr, job.master_port, timeout)
            except OSError:  # another agent of this machine serves it
                if len(job.hosts) > 1:
                    raise
        return TCPStore(
            job.master_addr, job.master_port, is_master=False, timeout=timeout, wait_for_workers=False
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        raise LaunchError(
            f"host {job.host} cannot reach the rendezvous at {job.master_addr}:{job.master_port}: "
            f"{error}; check --master_addr, --master_port and the firewall"
        ) from error


def _serves(job: HostJob) -> bool:
    """Whether this process holds the store: the first host of a known list; else the host that has the address."""
    return job.host_rank == 0 if len(job.hosts) > 1 else _matches_machine_hostname(job.master_addr)


def _own_address(job: HostJob) -> str:
    """The address of this host as hosts see it that reach the rendezvous."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((job.master_addr, job.master_port or 1))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return job.host
