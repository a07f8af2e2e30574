"""Ranks of a checkpoint that are threads of one process: quick, and every rank's memory can be looked at.

from dsx_testkit.thread_ranks import on_threads

results = on_threads(3, lambda rank, ranks: save(folder, "t", ..., ranks=ranks))   # each one's result or exception
"""

import pickle
import threading
from collections.abc import Callable
from typing import Any

from dsx_checkpoint import Ranks

PATIENCE = 30.0  # seconds until a rank that waits for the others gives up


class ThreadRanks(Ranks):
    """One of several threads that take part."""

    def __init__(self, rank: int, barrier: threading.Barrier, box: list[Any]) -> None:
        super().__init__(self._exchange, rank, len(box))
        self._barrier, self._box = barrier, box

    def _exchange(self, value: Any) -> list[Any]:
        """Every thread's value, in rank order, as copies that went through pickle, as between processes."""
        self._box[self.rank] = pickle.dumps(value)
        self._barrier.wait()
        values = [pickle.loads(data) for data in self._box]
        self._barrier.wait()
        return values


def on_threads(world: int, action: Callable[[int, Ranks], Any]) -> list[Any]:
    """Run `action(rank, ranks)` on `world` threads; returns each one's result or exception."""
    barrier, box, results = threading.Barrier(world, timeout=PATIENCE), [None] * world, [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = action(rank, ThreadRanks(rank, barrier, box))
        except Exception as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    return results
