"""`ignore_unused_parameters: false` with many ranks: what a rank receives grows as log2 of the ranks, whatever is
missing.

The real check runs on every rank, in a thread of its own. Where the ranks merge, the tree of `dsx_comm` is replayed
with its own places and its own packing, and what each rank receives is counted. That the replay counts what real ranks
send is a test on eight processes.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import threading
from collections import Counter
from types import SimpleNamespace

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_comm.object_tree import children_of, packed, unpacked
from dsx_testkit import run_ranks
from dsx_zero.grads.unused import UnusedParameters
from torch import nn

PARAMETERS = 150
NAME = 60  # characters of a name; an error names 8 parameters and 8 ranks of each
MOST = 2_048  # bytes of one message: nine parameters, each with its name and up to eight ranks, packed
MISSING = {
    "one on all": lambda rank, ranks: {7},
    "one on the last": lambda rank, ranks: {7} if rank == ranks - 1 else set(),
    "another on each": lambda rank, ranks: {rank % PARAMETERS},
    "all on all": lambda rank, ranks: set(range(PARAMETERS)),
}


class Replay:
    """`merge_objects` of many ranks, each in a thread."""

    def __init__(self, ranks: int) -> None:
        self.received: Counter[int] = Counter()
        self.messages: Counter[int] = Counter()
        self.longest = 0
        self._ranks, self._values, self._here = ranks, [None] * ranks, threading.local()
        self._barrier = threading.Barrier(ranks)

    def enter(self, rank: int) -> None:
        self._here.rank = rank

    def merge(self, value, merging, group=None):
        rank = self._here.rank
        self._values[rank] = value
        if self._barrier.wait() == 0:  # one of them does the work of all
            self._result = self.tree(list(self._values), merging)
        self._barrier.wait()
        return pickle.loads(self._result)

    def tree(self, values, merging) -> bytes:
        for place in reversed(range(self._ranks)):
            for child, _ in children_of(place, self._ranks):
                message = packed(pickle.dumps(values[child], pickle.HIGHEST_PROTOCOL))
                self._count(place, message)
                values[place] = merging(values[place], pickle.loads(unpacked(message)))
        told = pickle.dumps(values[0])
        for rank in range(1, self._ranks):
            self._count(rank, told)
        return told

    def _count(self, rank: int, message: bytes) -> None:
        self.received[rank] += len(message) + 8  # its length goes before it
        self.messages[rank] += 1
        self.longest = max(self.longest, len(message))


def units():
    """One unit with many parameters."""
    # Names of one model have much in common, and packing makes them small. These have nothing in common.
    names = tuple(hashlib.sha512(str(n).encode()).hexdigest()[:NAME] for n in range(PARAMETERS))
    group = SimpleNamespace(
        layout=SimpleNamespace(names=names),
        parameters=[nn.Parameter(torch.zeros(1)) for _ in names],
        ranks=SimpleNamespace(holders=None),
    )
    return [SimpleNamespace(trainable=[group])]


def check_on_all(ranks: int, missing, monkeypatch) -> tuple[Replay, list[str]]:
    """The errors of all ranks."""
    shared, replay, said = units(), Replay(ranks), [""] * ranks
    checks = [UnusedParameters(shared, SimpleNamespace(group=None, rank=rank, size=ranks)) for rank in range(ranks)]
    for rank, one in enumerate(checks):
        absent = missing(rank, ranks)
        for index, parameter in enumerate(shared[0].trainable[0].parameters):
            if index not in absent:
                one._arrived(index, parameter)
    monkeypatch.setattr(dsx_comm, "merge_objects", replay.merge)

    def run(rank: int) -> None:
        replay.enter(rank)
        try:
            checks[rank].check()
        except dsx_zero.ZeroStateError as error:
            said[rank] = str(error)

    threading.stack_size(1 << 19)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    threading.stack_size(0)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replay, said


@pytest.mark.parametrize("ranks", [64, 1024])
@pytest.mark.parametrize("missing", MISSING)
def test_a_rank_receives_few_bytes(missing, ranks, monkeypatch):
    replay, said = check_on_all(ranks, MISSING[missing], monkeypatch)
    assert len(set(said)) == 1 and "no gradient since the last step for " in said[0]
    assert len(said[0]) < 9 * (NAME + 100)  # the error is bounded too
    # Two merges: is all there, and what is missing. Each goes up the tree and comes back as one message.
    assert max(replay.messages.values()) <= 2 * (math.ceil(math.log2(ranks)) + 1)
    assert replay.longest <= MOST
    assert max(replay.received.values()) <= MOST * (math.ceil(math.log2(ranks)) + 2)


def test_nothing_more_is_said_where_all_is_there(monkeypatch):
    replay, said = check_on_all(64, lambda rank, ranks: set(), monkeypatch)
    assert set(said) == {""} and replay.longest < 16
    assert max(replay.messages.values()) <= math.ceil(math.log2(64)) + 1


class Some(nn.Module):
    """Two layers of which only the first is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def bytes_of_ranks(rank: int, world: int) -> tuple[int, str]:
    dsx_comm.objects.MANY_RANKS = 2  # as of many ranks: by the tree
    model, optimizer = dsx_zero.shard(Some(), torch.optim.AdamW, stage=1, config={"ignore_unused_parameters": False})
    model(torch.ones(1, 2)).sum().backward()
    with dsx_comm.count_traffic() as traffic, pytest.raises(dsx_zero.ZeroStateError) as found:
        optimizer.step()
    return traffic.by_op()["join_objects"][1], str(found.value)


def test_the_replay_counts_what_real_ranks_send(monkeypatch):
    world = 8
    sent, (said, *others) = zip(*run_ranks(bytes_of_ranks, world, timeout=90))
    assert set(others) == {said} and "unused.weight (rank 0, 1, 2, 3, 4, 5, 6, 7)" in said
    replay = Replay(world)
    for values, merging in (
        ([False] * world, lambda one, other: one and other),
        ([{(i, f"unused.{n}"): (1, [r]) for i, n in ((2, "weight"), (3, "bias"))} for r in range(world)], _both()),
    ):
        replay.tree(list(values), merging)
    told = sum(replay.received[rank] for rank in range(1, world, 2))  # odd places have nobody below: only the answers
    answers = told // (world // 2) * (world - 1)
    assert sum(sent) == sum(replay.received.values()) - answers


def _both():
    from dsx_zero.grads import unused

    return unused._both
