"""Gives the ranks of a save their parts of a plan.

    1) every rank sends two hashes (the tensors that it knows, the regions that it holds), and what is new in each save
    2) if rank 0 and all ranks still have the plan of these hashes, that is all: a second save of a layout plans nothing
    3) else rank 0 asks for what the hashes stand for, of one rank of each kind, makes the plan, and gives each rank its
       part

So a rank sends and receives what belongs to its own pieces. The last plans are kept in memory (`_KEPT` of them).
"""

from __future__ import annotations

import gc
import hashlib
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .announcing import Catalogue, Holding, Told
from .errors import CheckpointError
from .planning import WritePlan, merged_numbers
from .ranks import Ranks, host_label, numbered
from .shares import RankPlan, Share, make_shares
from .snapshot import Snapshot

__all__ = ["Agreed", "Hello", "WholePlan", "agree"]

_KEPT = 2


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's collector: a plan has a million objects and no cycles, and looking for some takes a sixth of
    the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class WholePlan:
    """Rank 0's part of a planned save.

    Attributes:
        plan: see there.
        numbers: optimizer states that are one number: state -> parameter -> value.
        rank_states: encoded, of each rank; empty where no rank has one.
        hosts: the host of each rank.
    """

    plan: WritePlan
    numbers: Mapping[str, Mapping[str, Any]]
    rank_states: Sequence[Any]
    hosts: Sequence[int]


@dataclass(frozen=True)
class Agreed:
    """A rank's result: its part of the plan, on rank 0 the whole plan, and 12 hexadecimal digits that no other save
    has.
    """

    plan: RankPlan
    whole: WholePlan | None
    unique: str


@dataclass(frozen=True)
class Hello:
    """The message of every rank at each save.

    Attributes:
        kind: hashes of its catalogue and its holding.
        numbers: see `Snapshot`.
        rank_state: see `Snapshot`.
        path: the folder that it was given, with links resolved.
        host: what is equal for ranks of one host.
        plans: plans of which it has its part for these hashes.
    """

    kind: tuple[bytes, bytes]
    numbers: Mapping[str, Sequence[Any]]
    rank_state: Any
    path: str
    host: str
    plans: tuple[str, ...]


@dataclass(frozen=True)
class _Reply:
    """Rank 0's answer: the plan, with this rank's part of it if the rank lacks it; or what the rank is asked for."""

    plan: str = ""
    share: Share | None = None
    unique: str = ""
    wants_catalogue: bool = False
    wants_holding: bool = False


@dataclass
class _Kept:
    """The last values, by key."""

    most: int
    values: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: Hashable) -> Any:
        """The value, or None."""
        with self.lock:
            if key in self.values:
                self.values.move_to_end(key)
            return self.values.get(key)

    def put(self, key: Hashable, value: Any) -> None:
        """Keep a value, and let the oldest go."""
        with self.lock:
            self.values[key] = value
            self.values.move_to_end(key)
            while len(self.values) > self.most:
                self.values.popitem(last=False)


_PLANS = _Kept(_KEPT)
"""Rank 0's: what all ranks told, as a hash -> name of the plan, and the plan."""
_PARTS = _Kept(2 * _KEPT)
"""A rank's: its number, the number of ranks, and its hashes -> its part of the plan."""


def agree(
    ranks: Ranks,
    tell: Callable[[], tuple[Snapshot, str]],
    *,
    check_folders: Callable[[Sequence[str]], None] = lambda paths: None,
    max_file_bytes: int,
    chunk_bytes: int,
) -> Agreed:
    """Give every rank its part of the plan. Collective.

    Args:
        tell: gives this rank's snapshot, and the folder; it may fail.
        check_folders: raises where ranks that see one disk name different folders. Called on rank 0.

    Raises:
        CheckpointError: the same on all ranks: `tell` failed on one, or ranks contradict each other.
    """
    first = First(check_folders, max_file_bytes, chunk_bytes)
    listed: list[tuple[Snapshot, Hashable, RankPlan | None]] = []  # one item, once `hello` was called

    def hello() -> Hello:
        snapshot, path = tell()
        kind = (snapshot.catalogue.digest(), snapshot.holding.digest())
        mine = (ranks.rank, ranks.world_size, kind)
        plan = _PARTS.get(mine)
        listed.append((snapshot, mine, plan))
        known = () if plan is None else (plan.plan,)
        return Hello(kind, snapshot.numbers, snapshot.rank_state, path, host_label(), known)

    reply: _Reply = ranks.through_first("listing what to save", hello, first.greet)
    snapshot, mine, plan = listed[0]
    if not reply.plan:

        def details() -> tuple[Catalogue | None, Holding | None]:
            return (
                snapshot.catalogue if reply.wants_catalogue else None,
                snapshot.holding if reply.wants_holding else None,
            )

        reply = ranks.through_first("listing what to save", details, first.plan)
    if reply.share is not None:
        plan = RankPlan.of(reply.share, snapshot.pieces)
        _PARTS.put(mine, plan)
    if plan is None:
        raise CheckpointError(f"rank {ranks.rank} got no part of the plan {reply.plan}")
    return Agreed(plan, first.whole, reply.unique)


class First:
    """The work of rank 0 for all ranks."""

    def __init__(self, check_folders: Callable[[Sequence[str]], None], max_file_bytes: int, chunk_bytes: int) -> None:
        self._check_folders, self._sizes = check_folders, (max_file_bytes, chunk_bytes)
        self._hellos: Sequence[Hello] = ()
        self._hosts: tuple[int, ...] = ()
        self.whole: WholePlan | None = None

    def greet(self, hellos: Sequence[Hello]) -> list[_Reply]:
        """Answer with the plan of an earlier save, or ask for what is needed to make one."""
        self._check_folders([hello.path for hello in hellos])
        self._hellos = hellos
        self._hosts = numbered([hello.host for hello in hellos])
        known = _PLANS.get(self._key())
        if known is not None:
            return self._answer(*known)
        catalogues: set[bytes] = set()
        kinds: set[tuple[bytes, bytes]] = set()
        replies = []
        for hello in hellos:
            replies.append(
                _Reply(wants_catalogue=hello.kind[0] not in catalogues, wants_holding=hello.kind not in kinds)
            )
            catalogues.add(hello.kind[0])
            kinds.add(hello.kind)
        return replies

    def plan(self, details: Sequence[tuple[Catalogue | None, Holding | None]]) -> list[_Reply]:
        """Make the plan, and give each rank its part."""
        with _uncollected():
            return self._planned(details)

    def _planned(self, details: Sequence[tuple[Catalogue | None, Holding | None]]) -> list[_Reply]:
        catalogues: dict[bytes, int] = {}
        kinds: dict[tuple[bytes, bytes], int] = {}
        for hello in self._hellos:
            catalogues.setdefault(hello.kind[0], len(catalogues))
            kinds.setdefault(hello.kind, len(kinds))
        told = Told(
            [catalogue for catalogue, _ in details if catalogue is not None],
            [holding for _, holding in details if holding is not None],
            [(catalogues[hello.kind[0]], kinds[hello.kind]) for hello in self._hellos],
        )
        max_file_bytes, chunk_bytes = self._sizes
        made = WritePlan.make(told, max_file_bytes=max_file_bytes, chunk_bytes=chunk_bytes, hosts=self._hosts)
        name = uuid.uuid4().hex
        replies = self._answer(name, made)
        _PLANS.put(self._key(), (name, made))
        return replies

    def _key(self) -> bytes:
        found = hashlib.sha256(repr((self._sizes, self._hosts)).encode())
        for hello in self._hellos:
            found.update(b"".join(hello.kind))
        return found.digest()

    def _answer(self, name: str, plan: WritePlan) -> list[_Reply]:
        states = [hello.rank_state for hello in self._hellos]
        self.whole = WholePlan(
            plan,
            merged_numbers(plan, [hello.numbers for hello in self._hellos]),
            states if any(state is not None for state in states) else (),
            self._hosts,
        )
        unique = uuid.uuid4().hex[:12]
        lacking = [rank for rank, hello in enumerate(self._hellos) if name not in hello.plans]
        shares = make_shares(plan, name, lacking, self._hosts) if lacking else {}
        return [_Reply(name, shares.get(rank), unique) for rank in range(len(self._hellos))]
