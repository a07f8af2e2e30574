"""The signs of life of the hosts of an elastic job, each in a key of its own.

In torch's rendezvous they are a part of the one state that all hosts replace, so that of many hosts that give a sign at
the same time one succeeds, and its time is compared with the clock of another host. Here each host counts up a number
of its own, and others look whether it still grows, by their own clock. A host looks after the next few in the order of
their names; when one of those is silent, after twice as many, because who looked after the others may be lost, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

__all__ = ["WATCHED", "Beats"]

WATCHED = 8
"""The number of other hosts that a host watches while all of them send heartbeats."""


class Beats:
    """The heartbeats that one host sends, and those of other hosts that it sees.

    Args:
        store: where all hosts of the job look.
        prefix: of the keys.
        every_s: seconds between two signs of a host.
        clock: for tests.
    """

    def __init__(self, store: Store, prefix: str, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._prefix, self._every_s, self._clock = store, prefix, every_s, clock
        self._own: _NodeDesc | None = None
        self._own_at: datetime | None = None
        self._seen: dict[_NodeDesc, tuple[int, float]] = {}
        self._looked_at: float | None = None
        self._watched = WATCHED

    def give(self, node: _NodeDesc, when: datetime) -> None:
        """Give a sign of life of this host."""
        self._own, self._own_at = node, when
        self._store.add(self._key(node), 1)

    def heard(self, nodes: Iterable[_NodeDesc]) -> dict[_NodeDesc, datetime]:
        """The time of the last heartbeat of each host, by this machine's clock. Hosts that this one does not watch
        count as heard now.
        """
        all_nodes = list(nodes)
        now, moment = self._clock(), datetime.now(timezone.utc)
        watched = self._after_own(all_nodes)
        if self._looked_at is None or now - self._looked_at >= self._every_s / 2 or watched != list(self._seen):
            self._look(watched, now)
        times = {node: moment - timedelta(seconds=now - at) for node, (_, at) in self._seen.items()}
        heard = {node: times.get(node, moment) for node in all_nodes}
        if self._own in heard and self._own_at is not None:
            heard[self._own] = self._own_at
        return heard

    def _after_own(self, nodes: Iterable[_NodeDesc]) -> list[_NodeDesc]:
        order = sorted((node for node in nodes if node != self._own), key=_place)
        start = 0 if self._own is None else sum(_place(node) < _place(self._own) for node in order)
        return [*order[start:], *order[:start]][: self._watched]

    def _look(self, watched: list[_NodeDesc], now: float) -> None:
        before, self._seen = self._seen, {}
        for node in watched:
            count = self._store.add(self._key(node), 0)  # a read that does not wait for a key that is not there
            known = before.get(node)
            self._seen[node] = known if known is not None and known[0] == count else (count, now)
        self._looked_at = now
        silent = any(now - at > 2 * self._every_s for _, at in self._seen.values())
        self._watched = 2 * self._watched if silent and self._watched == len(watched) else self._watched
        if not silent:
            self._watched = WATCHED

    def _key(self, node: _NodeDesc) -> str:
        return f"{self._prefix}.{node.addr}.{node.pid}.{node.local_id}"


def _place(node: _NodeDesc) -> tuple[str, int, int]:
    return node.addr, node.pid, node.local_id
