"""What groups, agreement and reports cost a rank of a large job: the laws of `docs/guides/scale-groups.md`, each one
measured at two sizes or more, and the numbers of its table.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import dsx_comm
import dsx_zero
import pytest
import torch
import torch.distributed as dist
from dsx_comm import hang, on_demand
from dsx_comm.departures import Departures
from dsx_comm.doubling import rounds
from dsx_comm.open_files import files_needed
from dsx_core.open_files import allow_many
from dsx_testkit import count_calls, run_ranks
from dsx_testkit.counting_store import CountingStore
from dsx_zero.order.schedule import Kind, Operation, Post, decide, posts_of
from torch import nn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "scale-groups.md"
ROW = re.compile(r"^\| ([^|]+) \| `([^`]+)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", re.M)
SIZES = (64, 1024, 4096)
TABLE = {
    name: (law, [int(n.replace(",", "")) for n in numbers]) for name, law, *numbers in ROW.findall(PAGE.read_text())
}


def law(name: str, ranks: int) -> int:
    """What a row of the table says for so many ranks."""
    return eval(TABLE[name][0], {"P": ranks, "log": math.ceil(math.log2(ranks))})


def each(ranks, action):
    """Do `action(rank)` in a thread for each rank; returns the results."""
    results, errors = [None] * ranks, []

    def run(rank):
        try:
            results[rank] = action(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results


def sockets():
    """Open sockets of this process."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the folder's own
            continue
    return sum(name.startswith("socket:") for name in names)


def groups_of_threads(rank, world, ranks):
    """Make a first and a further group among threads of a process of its own; returns what they cost a rank."""
    allow_many()
    inner, minute, here = dist.HashStore(), timedelta(seconds=60), threading.local()
    stores = [CountingStore(inner) for _ in range(ranks)]
    with (
        mock.patch.object(on_demand, "MANY_RANKS", 8),
        mock.patch.object(on_demand, "WHOLE_TABLE", 8),
        mock.patch.object(on_demand, "_default_gloo", lambda: here.first),
    ):
        before = sockets()
        first = each(ranks, lambda rank: on_demand.gloo_group(stores[rank], rank, ranks, minute))
        requests, read = [sum(s.requests.values()) for s in stores], [s.read for s in stores]

        def agree(rank):
            start = partial(on_demand._start, first[rank], range(ranks))
            table = on_demand._over(start, torch.tensor([rank], dtype=torch.uint8), rank, ranks)
            assert table.flatten().tolist() == list(range(ranks))
            total = torch.ones(1)
            first[rank].allreduce([total]).wait()
            assert total.item() == ranks
            first[rank].barrier().wait()

        each(ranks, agree)
        agreed = sockets()

        def further(rank):
            here.first = first[rank]
            return on_demand.gloo_group(stores[rank], rank, ranks, minute, range(ranks))

        more = each(ranks, further)
        found = {
            "sockets": (agreed - before) / ranks,
            "further": (sockets() - agreed) / ranks,
            "requests": requests,
            "read": read,
            "further requests": [sum(s.requests.values()) - known for s, known in zip(stores, requests)],
        }
    assert len(first) == len(more) == ranks
    return found


@pytest.mark.parametrize("ranks", [16, 32])
def test_groups_on_the_host(ranks):
    (found,) = run_ranks(groups_of_threads, 1, ranks, backend=None)
    assert found["sockets"] == law("sockets of a rank for a group on the host that agrees", ranks)
    assert found["further"] == law("sockets of a rank for a further group that says nothing", ranks)
    assert set(found["requests"]) == {law("requests of a rank to the store for the first group", ranks)}
    assert set(found["read"]) == {law("bytes that a rank reads from the store for the first group", ranks)}
    assert set(found["further requests"]) == {law("requests of a rank to the store for a further group", ranks)}


def started(rank, world):
    """A start between machines, as in a job of many ranks."""
    from dsx_comm import agreement, groups, objects
    from dsx_comm.shm import segment

    def elsewhere(name, patience):
        raise segment.Unavailable("another machine")

    segment.fetch = elsewhere
    for module in (agreement, groups, objects, on_demand):
        module.MANY_RANKS = 2
    store = CountingStore(
        dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0, wait_for_workers=False
        )
    )
    dist.init_process_group("gloo_on_demand", store=store, rank=rank, world_size=world)
    model, optimizer = dsx_zero.shard(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lambda p: torch.optim.SGD(p, lr=0.1), stage=3
    )
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(store.requests.values())


@pytest.mark.parametrize("ranks", [3, 5])
def test_a_start_asks_the_store_a_bounded_number_of_times(ranks):
    # rank 0 looks again and again whether the others have come
    counts = run_ranks(started, ranks, backend=None, timeout=90)[1:]
    assert max(counts) <= law("requests of a rank to the store for a start at stage 3, at most", ranks), counts
    assert max(counts) - min(counts) <= 8  # who comes last says so for all


class Model(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Messages(dsx_comm.RehearsalObserver):
    def __init__(self):
        self.start()

    def start(self):
        self.counts, self.words = Counter(), []

    def issued(self, message):
        self.counts[message.op] += 1
        if message.op == "all_gather" and message.element == 8:
            self.words.append(message.received)


@pytest.mark.parametrize(("ranks", "blocks"), [(64, 4), (1024, 1), (4096, 1)])
def test_a_step_in_which_the_ranks_agree(ranks, blocks):
    seen = Messages()
    with dsx_comm.rehearse(ranks, observer=seen):
        model, optimizer = dsx_zero.shard(
            Model(blocks),
            lambda p: torch.optim.SGD(p, lr=0.1),
            config={"stage": 3, "stage3_param_persistence_threshold": 0},
        )
        assert seen.counts["broadcast"] == blocks + 1
        for _ in range(2):
            seen.start()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert len(seen.words) == 3 * (blocks + 1) + 3
            assert set(seen.words) == {law("bytes that a rank receives in a round of words", ranks)}
        seen.start()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert len(seen.words) == 1
    messages = law("messages of a rank in a step in which the ranks agree, 80 blocks", ranks)
    assert messages == (3 * 81 + 3) * len(list(rounds(ranks)))
    assert ranks > 1024 or messages * 30e-6 <= 0.1


def test_python_calls_in_a_round():
    words = Post(Operation(Kind.GATHER, 3), position=5).to_words()
    totals = []
    for ranks in SIZES:
        with count_calls("dsx_zero") as calls:
            decision = decide(posts_of([words] * ranks))
        assert decision.resume == frozenset(range(ranks))
        totals.append(calls.total)
        most = law("Python calls in a round in which all ranks say the same, at most", ranks)
        assert calls.total <= most, calls.table()
    assert len(set(totals)) == 1


@pytest.mark.parametrize("ranks", [16, 40])
def test_requests_of_a_hang_report(ranks, capfd):
    inner, here = dist.HashStore(), threading.local()
    stores = [CountingStore(inner) for _ in range(ranks)]
    watches = [hang.Watch() for _ in range(ranks)]
    raised = Counter()

    def until(done):  # instead of the pauses in which the others answer, and not counted
        for _ in range(3000):
            if done():
                return
            time.sleep(0.01)
        raise TimeoutError

    def answered():
        return inner.check(["alarm/0/answers"]) and inner.get("alarm/0/answers").count(b"\n") == ranks

    def look(rank):
        here.rank = rank
        watch = watches[rank]
        watch.settings = hang._Settings(limit=1.0, notice=0.5)
        if rank == 3:
            log = watch._state.logs["0"] = hang.GroupLog("0", 1.0, issued=2, op="barrier")
            watch._state.waiting[0] = hang.Waiting(log, 2, "barrier", None, "", 0, -100.0, 1.0)
        if rank != 3:
            until(lambda: inner.check(["alarm/0"]))  # each rank looks every few seconds anyway
        waits = answered if rank == 3 else (lambda: inner.check(["alarm/0/report"]))
        stop = SimpleNamespace(wait=lambda seconds: until(waits), is_set=lambda: False)
        watch._look(stores[rank], watch._state, 0.4, stop)
        raised[rank] = len(watch._state.stopped)

    world = SimpleNamespace(get_rank=lambda: here.rank, get_world_size=lambda: ranks, is_initialized=lambda: True)
    with mock.patch.object(hang, "dist", world), mock.patch.object(hang, "_my_groups", lambda: {"0"}):
        each(ranks, look)
    assert all(raised[rank] == 1 for rank in range(ranks))
    text = capfd.readouterr().err
    assert text.count("has waited") == 1 and len(text.splitlines()) <= 17  # of many ranks, or of each
    asked = sum(sum(store.requests.values()) for store in stores)
    looks = ranks  # each rank's look for an alarm
    assert asked - looks <= law("requests of all ranks for a hang report", ranks), sum(
        (store.requests for store in stores), Counter()
    )


@pytest.mark.parametrize("ranks", [16, 1024])
def test_requests_of_a_rank_that_fails(ranks):
    store = CountingStore(dist.HashStore())
    departures = Departures()
    departures.connect(store)
    for rank in range(ranks):
        number = store.inner.add("left", 1)
        if number <= 8:
            store.inner.set(f"left/{number}", f"{rank} ValueError: {rank}")
    found = {}
    departures._read(set(range(8, ranks)), found)  # the ranks whose reason is there are of another group: it looks on
    assert found == {}
    most = law("requests of a rank that fails, for the reasons of the others, at most", ranks)
    assert sum(store.requests.values()) == most
    departures._read(set(range(ranks)), found)
    assert found == {rank: f"ValueError: {rank}" for rank in range(8)}


@pytest.mark.parametrize("ranks", SIZES)
def test_groups_of_a_grid(ranks):
    grid = dsx_comm.ProcessTopology(("pipe", "data", "model"), (8, ranks // 64, 8))
    with (
        dsx_comm.rehearse(ranks),
        mock.patch.object(dist, "new_group", side_effect=dist.new_group) as made,
    ):
        dsx_comm.GroupRegistry(grid).build("pipe", "data", "model")
    assert made.call_count == law("calls of `new_group` of a rank for pipe 8 x data P/64 x model 8", ranks)


@pytest.mark.parametrize("ranks", SIZES)
def test_open_files(ranks):
    needed = files_needed(ranks, "cpu:gloo_on_demand,cuda:nccl")
    assert needed == law("open files that a rank needs, besides its own", ranks)


def test_the_table_says_what_its_laws_say():
    assert len(TABLE) == 14
    for name, (_, numbers) in TABLE.items():
        assert [law(name, ranks) for ranks in SIZES] == numbers, name
    sockets = TABLE["sockets of a rank for a group on the host that agrees"][1][1]
    further = TABLE["sockets of a rank for a further group that says nothing"][1][1]
    assert (
        2 * sockets + 2 * (further + 2) + 2 <= 64
    )  # default and agreement; checkpoints and preemption in rings; store
    assert TABLE["requests of all ranks for a hang report"][1][1] <= 5000
