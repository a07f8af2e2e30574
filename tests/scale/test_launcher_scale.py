"""What the launcher asks of the store of the first host, and what it sends to each host: the laws in the section
"Launcher" of `docs/guides/scale.md`, measured at several sizes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch.distributed as dist
from dsx_launch import LaunchError, news, rendezvous
from dsx_launch.failures import RankFailure
from dsx_launch.rendezvous import FailureBoard, Meeting
from dsx_testkit.counting_store import CountingStore

SIZES = (64, 256, 1024)


def meeting(hosts, host_rank, timeout_s=60.0):
    return Meeting("job", tuple(f"h{n}" for n in range(hosts)), host_rank, "a", 1, timeout_s=timeout_s)


def join(inner, hosts, host_rank, timeout_s=60.0):
    """Wait for all hosts as the agent of one; returns the way to the store."""
    store = CountingStore(inner)
    rendezvous._wait_for_all(store, meeting(hosts, host_rank, timeout_s), time.monotonic() + timeout_s)
    return store


def requests(hosts):
    """The requests of all hosts, and bytes read by others than the first one, when all are there at once."""
    inner = dist.HashStore()
    for rank in range(1, hosts):
        inner.append("job/dsx/joined", f"{rank},")
    stores = [join(inner, hosts, rank) for rank in range(hosts)]
    total = sum((store.requests for store in stores), Counter())
    return total, sum(store.read for store in stores[1:])


@pytest.mark.parametrize("hosts", SIZES)
def test_a_start_asks_two_requests_of_each_host(hosts):
    total, read = requests(hosts)
    assert total == {"append": hosts, "check": hosts, "get": 1, "set": 1} and read == 0


def test_hosts_that_wait_ask_one_request_each_time_and_together_no_more_than_a_bound(monkeypatch):
    hosts, slept, inner = 4096, [], dist.HashStore()

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 50:
            inner.set("job/dsx/all_joined", "1")

    monkeypatch.setattr(rendezvous.time, "sleep", sleep)
    store = join(inner, hosts, 7)
    assert store.requests == {"append": 1, "check": 51} and store.read == 0
    assert hosts / slept[0] <= rendezvous.REQUESTS_PER_S and set(slept) == {hosts / 1000}


def test_hosts_of_a_small_job_meet_and_a_command_that_was_started_again_counts_once(monkeypatch):
    inner, done = dist.HashStore(), []
    inner.append("job/dsx/joined", "2,")  # this host was started, ended, and will be started again
    threads = [threading.Thread(target=lambda n=n: done.append(join(inner, 4, n))) for n in (0, 2, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0.2)
    assert not done and all(thread.is_alive() for thread in threads)
    join(inner, 4, 3)
    for thread in threads:
        thread.join(30)
    assert len(done) == 3


@pytest.mark.parametrize("host_rank", [0, 5])
def test_hosts_that_do_not_come_are_named_with_one_more_request(host_rank):
    inner = dist.HashStore()
    inner.append("job/dsx/joined", "3,")
    with pytest.raises(LaunchError) as error:
        join(inner, 1000, host_rank, timeout_s=0.0)
    said = str(error.value)
    assert "h1, h2, h4" in said and "h3," not in said and f"h{host_rank}," not in said
    assert "982 more hosts did not join" in said and len(said) < 400


def failure(rank, moment, message="bad sample"):
    return RankFailure(rank=rank, host=f"h{rank}", time=moment, exitcode=1, type="ValueError", message=message)


@pytest.mark.parametrize("hosts", SIZES)
def test_a_host_finds_the_first_failure_with_five_requests(hosts, monkeypatch):
    inner = dist.HashStore()
    monkeypatch.setattr(rendezvous, "_client", lambda meeting, port: CountingStore(inner))
    for rank in range(1, hosts):  # all have failed: a switch is broken
        gone = rank % 3 == 0
        told = failure(rank, 100.0 - (50 if gone else rank / hosts), "connection closed" if gone else "ü\n" * 2000)
        FailureBoard(meeting(hosts, rank), 1).post(told)
    board = FailureBoard(meeting(hosts, 0), 1)
    monkeypatch.setattr(news, "FailureBoard", lambda meeting, port: board)
    first = news.cause_of_the_job(meeting(hosts, 0), 1, failure(0, 200.0), wait_s=0.0)
    last = max(rank for rank in range(1, hosts) if rank % 3)
    assert (first.rank, first.message) == (last, "ü\n" * 2000)
    assert board._store.requests == {"set": 2, "append": 1, "get": 2}
    assert board._store.read < 64 * hosts + 32_000
