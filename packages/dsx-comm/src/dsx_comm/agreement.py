"""Checks that all ranks call the same collective. This is done for the first calls of each group, before data moves.

Every rank describes its call in a line (operation, size, dtype, operator, root). The first rank to come writes its line
to the job's store. The others compare theirs with it, and the last one writes whether all lines were equal. So a call
costs each rank four short requests, whatever the number of ranks. It is done for the first `CHECKED` calls of a group,
because programs repeat themselves (`CHECKED_OF_MANY` of many ranks: one store answers all), and not for sends and
receives. Only if lines differ do the ranks read each other's.
Groups of the "dsx" backend need none of this: they compare within every call, at no cost.

If a rank does not come within `PATIENCE` seconds, the check of that call ends, not the call: two groups may be used in
different order on two ranks, and a missing rank is found by the hang explainer.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .errors import CommArgumentError, MismatchError
from .meeting import fresh_prefix
from .on_demand import MANY_RANKS

CHECKED, CHECKED_OF_MANY = 10, 2
PATIENCE = 2.0
_NAMED = 16  # ranks that are told apart in an error
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
    """Counters of the calls of each group: those that were compared, and those to compare."""

    def __init__(self) -> None:
        self.calls: int | None = None  # None: by the number of ranks
        self._seen: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._world: Any = None
        self._prefix = ""

    def post(self, call: Any) -> Callable[[], None] | None:
        """Say what this rank calls; the result compares it with the other ranks' call of the same number.

        That raises MismatchError naming what each rank calls. Synchronous calls compare before they are issued,
        asynchronous ones when they are waited for. None: there is nothing to compare.
        """
        group = call.group
        number = self._seen.get(group, 0)
        if number >= self._most(group) or call.op in _SKIPPED:
            return None
        if self._world is not dist.group.WORLD:
            self._begin()
        self._seen[group] = number + 1
        name = group.group_name
        mine = (f"{call.op} of {call.message} bytes" if call.op in _EVEN else call.op) + call.detail
        store = _store(f"{self._prefix}{name}/{number}/")
        ranks = dist.get_process_group_ranks(group)
        _post(store, mine, len(ranks))
        return lambda: _compare(store, mine, ranks, f"call #{number + 1} of group {name}")

    def is_over(self, group: Any) -> bool:
        """Whether no further call of this group is to be compared."""
        most = self.calls  # without `_most`: this is on the way of every prepared call
        if most is None:
            most = CHECKED if group.size() < MANY_RANKS else CHECKED_OF_MANY
        return self._seen.get(group, 0) >= most

    def _most(self, group: Any) -> int:
        """The number of calls of the group that are compared."""
        if self.calls is not None:
            return self.calls
        return CHECKED if group.size() < MANY_RANKS else CHECKED_OF_MANY

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


def _store(prefix: str) -> Any:
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]


def _post(store: Any, mine: str, ranks: int) -> None:
    """Leave this rank's line, and the verdict if this rank is the last to come."""
    if store.compare_set("first", "", mine).decode() != mine:
        other = store.add("others", 1)  # before "came", so that the last one sees it
        store.set(f"other/{other}", f"{dist.get_rank()} {mine}")
    if store.add("came", 1) == ranks:
        store.set("verdict", "alike" if store.add("others", 0) == 0 else "different")


def _compare(store: Any, mine: str, ranks: list[int], where: str) -> None:
    """Wait for the verdict; raise MismatchError if the ranks' lines differ."""
    try:
        store.wait(["verdict"], timedelta(seconds=PATIENCE))
    except RuntimeError:  # some rank did not come in time, or the store is gone
        return
    if store.get("verdict") != b"different":
        return
    count = store.add("others", 0)
    others = [store.get(f"other/{n}").decode() for n in range(1, min(count, _NAMED) + 1)]
    lines = {int(rank): line for rank, line in (other.split(" ", 1) for other in others)}
    first = store.get("first").decode()
    said = "; ".join(f"rank {rank}: {lines.get(rank, first)}" for rank in ranks[:_NAMED])
    if len(ranks) > _NAMED:
        named = "; ".join(f"rank {rank}: {line}" for rank, line in sorted(lines.items()))
        said = f"{named}; {count} of {len(ranks)} ranks differ from the first to come: {first}"
    raise MismatchError(
        f"ranks call different collectives ({where}): {said}. What they would have exchanged means nothing."
    )


def check_first_calls(calls: int) -> None:
    """Compare the first `calls` collectives of every group between ranks (0: none). Without this call it is 10, and 2
    of a group of 32 or more ranks.

    Raises CommArgumentError for a negative number.
    """
    if calls < 0:
        raise CommArgumentError(f"calls: got {calls}, expected at least 0")
    AGREEMENT.calls = calls
