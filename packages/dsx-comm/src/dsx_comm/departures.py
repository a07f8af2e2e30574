"""The reasons for which ranks left a job. A rank that fails writes its reason to the store before it ends, so that the
others can name the rank and its error.

A backend that loses a connection says "Connection closed by peer", but not which rank that was nor what happened to it.
A rank whose process ends with an exception, or that destroys its process group while an exception is being raised,
first writes one line to the job's store, unless several ranks have done so before. A rank that then fails in a call
reads them there: as many requests in a large job as in a small one.

Left out: ranks that are killed, which cannot write (groups of the "dsx" backend name those by themselves), and ranks
that end without an error.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

_PATIENCE = 5.0  # seconds for a store that may be gone with the rank, or may be slow on a busy host
_MOST_NAMED = 8  # those that leave first have the reason, and each rank that fails reads them all
_PAUSES = (0.0, 0.1, 0.2)  # seconds before each look


class Departures:
    """The messages that ranks of one world wrote as they left it."""

    def __init__(self) -> None:
        self._store: Any = None

    def connect(self, store: Any) -> None:
        """Use `store` from now on; its keys are this world's alone."""
        self._store = store

    def announce(self) -> None:
        """Say why this rank leaves, if it leaves with an exception."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if self._store is None or error is None or isinstance(error, SystemExit) or not dist.is_initialized():
            return
        said = f"{type(error).__name__}: {error}".strip().splitlines()[0][:500]
        with contextlib.suppress(RuntimeError):  # the store is gone already: no rank is left to read it
            number = self._store.add("left", 1)
            if number <= _MOST_NAMED:
                self._store.set(f"left/{number}", f"{dist.get_rank()} {said}")

    def of_group(self, name: str) -> dict[int, str]:
        """{global rank: why} of the other members of the group `name` that have said so."""
        world = dist.distributed_c10d._world
        group = next((group for group, known in list(world.pg_names.items()) if known == name), None)
        if self._store is None or group is None:
            return {}
        others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
        found: dict[int, str] = {}
        thread = threading.Thread(target=self._read, args=(others, found), daemon=True, name="dsx-comm-departures")
        with contextlib.suppress(RuntimeError):  # no thread can be started: the error is raised without the reason
            thread.start()  # not this thread: a store on a machine that is gone may not answer for many minutes
            thread.join(_PATIENCE)
        return dict(found)

    def _read(self, ranks: set[int], found: dict[int, str]) -> None:
        # A rank that ends does not wait for the store's answer, so that its end can be seen before its line is there.
        with contextlib.suppress(RuntimeError):  # the store is gone
            for pause in _PAUSES:
                time.sleep(pause)
                for number in range(1, min(self._store.add("left", 0), _MOST_NAMED) + 1):
                    key = f"left/{number}"
                    if self._store.check([key]):
                        rank, said = self._store.get(key).decode().split(" ", 1)
                        if int(rank) in ranks:
                            found[int(rank)] = said
                if found:
                    return
