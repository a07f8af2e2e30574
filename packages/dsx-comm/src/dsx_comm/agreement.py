"""Do all ranks call the same collective? Checked on the first calls of each group, before data moves.

Every rank posts a line (operation, size, dtype, operator, root) in the job's store and reads the others'. That costs a few round trips, so it is
done for the first `CHECKED` calls of a group, in which a program shows what it does, and not for sends and receives.
Groups of the "dsx" backend need none of this: they compare within every call, at no cost.

A rank that does not post within `PATIENCE` seconds ends the check of that call, not the call: two groups used in different
order on two ranks are legal, and a missing rank is the hang explainer's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .errors import CommArgumentError, MismatchError
from .meeting import fresh_prefix

CHECKED = 10
PATIENCE = 2.0
_SKIPPED = frozenset(("send", "recv", "isend", "irecv", "batch_isend_irecv", "monitored_barrier"))
# calls whose size must be the same on all ranks; of others the operation, dtypes, operator and root are compared
_EVEN = frozenset(
    (
        "all_reduce",
        "inference_all_reduce",
        "reduce",
        "reduce_scatter_tensor",
        "all_gather_into_tensor",
        "all_gather",
        "broadcast",
        "gather",
        "scatter",
        "all_reduce_coalesced",
        "all_gather_coalesced",
        "reduce_scatter_coalesced",
    )
)


class Agreement:
    """How many calls of each group were compared, and how many are to be."""

    def __init__(self) -> None:
        self.calls = CHECKED
        self._seen: dict[str, int] = {}
        self._world: Any = None
        self._prefix = ""

    def post(self, call: Any) -> Callable[[], None]:
        """Say what this rank calls; the result compares it with the other ranks' call of the same number.

        That raises MismatchError naming what each rank calls. Synchronous calls compare before they are issued,
        asynchronous ones when they are waited for.
        """
        if self.calls <= 0 or call.op in _SKIPPED:
            return _nothing
        if self._world is not dist.group.WORLD:
            self._begin()
        name = call.group.group_name
        number = self._seen.get(name, 0)
        if number >= self.calls:
            return _nothing
        self._seen[name] = number + 1
        mine = (f"{call.op} of {call.message} bytes" if call.op in _EVEN else call.op) + call.detail
        store = _store(f"{self._prefix}{name}/{number}/")
        store.set(str(dist.get_rank()), mine)
        ranks = dist.get_process_group_ranks(call.group)

        def compare() -> None:
            lines = _lines(store, ranks)
            if lines is not None and any(line != mine for line in lines.values()):
                said = "; ".join(f"rank {rank}: {line}" for rank, line in lines.items())
                raise MismatchError(
                    f"ranks call different collectives (call #{number + 1} of group {name}): {said}. "
                    "What they would have exchanged means nothing."
                )

        return compare

    def _begin(self) -> None:
        """There is a new world, perhaps in a store that has lines of an earlier one."""
        self._seen.clear()
        self._world = dist.group.WORLD
        self._prefix = fresh_prefix(dist.distributed_c10d._get_default_store(), "dsx_agree", dist.get_rank())

    def forget(self) -> None:
        """The groups are gone."""
        self._seen.clear()
        self._world = None


AGREEMENT = Agreement()


def _nothing() -> None:
    """Compared often enough."""


def _store(prefix: str) -> Any:
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())  # pyright: ignore[reportPrivateImportUsage]


def _lines(store: Any, ranks: list[int]) -> dict[int, str] | None:
    """{global rank: its line}, or None if somebody did not come in time."""
    keys = [str(r) for r in ranks]
    until = time.monotonic() + PATIENCE
    while not store.check(keys):
        if time.monotonic() > until:
            return None
        time.sleep(0.0005)
    return {r: line.decode() for r, line in zip(ranks, store.multi_get(keys))}


def check_first_calls(calls: int) -> None:
    """Compare the first `calls` collectives of every group between ranks (default 10; 0: none).

    Raises CommArgumentError for a negative number.
    """
    if calls < 0:
        raise CommArgumentError(f"calls: got {calls}, expected at least 0")
    AGREEMENT.calls = calls
