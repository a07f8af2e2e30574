"""What the launcher asks of the store of the first host, and what it sends to each host: the laws in the section
"Launcher" of `docs/guides/scale.md`, measured at several sizes.
"""

from __future__ import annotations

import math
import pickle
import re
import sys
import threading
import time
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch.distributed as dist
from dsx_launch import LaunchError, news, rendezvous
from dsx_launch.elastic_rendezvous import meet
from dsx_launch.elastic_settings import Elastic
from dsx_launch.elastic_state import JsonState
from dsx_launch.failures import RankFailure
from dsx_launch.host import HostJob, Program
from dsx_launch.options import parse
from dsx_launch.plan import HostsPlan, elastic_of, make_plan
from dsx_launch.rendezvous import FailureBoard, Meeting
from dsx_launch.runners.ssh import WINDOW
from dsx_testkit.counting_store import CountingStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

SIZES = (64, 256, 1024)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "scale.md"
ROW = re.compile(r"^\| ([^|]+) \| `([^`]+)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", re.M)
TABLE = ROW.findall(PAGE.read_text().partition("\n## Launcher\n")[2].partition("\n## ")[0])


def law(words: str, hosts: int) -> int:
    """What the row of the table that begins with these words says for so many hosts."""
    (formula,) = (formula for name, formula, *_ in TABLE if name.startswith(words))
    return eval(formula, {"H": hosts, "ceil": math.ceil, "min": min, "max": max})


def test_the_table_is_what_its_laws_say():
    assert len(TABLE) == 7
    for name, _, *numbers in TABLE:
        assert [int(n.replace(",", "")) for n in numbers] == [law(name, hosts) for hosts in SIZES], name


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
    assert sum(total.values()) == law("store requests of a start", hosts)


@pytest.mark.parametrize("hosts", [*SIZES, 4096])
def test_hosts_that_wait_ask_one_request_each_time_and_together_no_more_than_a_bound(hosts, monkeypatch):
    slept, inner = [], dist.HashStore()

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 50:
            inner.set("job/dsx/all_joined", "1")

    monkeypatch.setattr(rendezvous.time, "sleep", sleep)
    store = join(inner, hosts, 7)
    assert store.requests == {"append": 1, "check": 51} and store.read == 0
    (interval,) = set(slept)
    assert hosts / interval == pytest.approx(law("store requests per second", hosts))


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
    assert board._store.requests.total() == law("store requests of a failing host", hosts)
    assert board._store.read < 64 * hosts + 32_000


@pytest.mark.parametrize("hosts", [1, *SIZES, 4096])
def test_signs_of_life_of_an_elastic_job_are_no_more_than_a_hundred_a_second(hosts):
    elastic = elastic_of(parse(["--elastic_training", "t.py"]), hosts)
    assert Elastic.from_text(elastic.to_text()).keep_alive_s == elastic.keep_alive_s
    settings = meet(HostJob(program=Program(sys.executable), procs=1), elastic)._settings
    assert settings.keep_alive_interval == timedelta(seconds=law("seconds between", hosts))
    assert settings.keep_alive_max_attempt == 4 and hosts / settings.keep_alive_interval.seconds <= 100


@pytest.mark.parametrize("hosts", SIZES)
def test_a_sign_of_life_leaves_the_state_alone_and_asks_a_bounded_number_of_requests(hosts):
    store = CountingStore(dist.HashStore())
    elastic = elastic_of(parse(["--elastic_training", "t.py"]), hosts)
    backend, state = JsonState(store, "job", elastic.keep_alive_s), _RendezvousState()
    own, *_ = nodes = [_NodeDesc(f"h{n}", 1, 0) for n in range(hosts)]
    state.participants = {node: rank for rank, node in enumerate(nodes)}
    bits, token, written = backend.set_state(pickle.dumps(state))
    for _ in range(3):
        state = pickle.loads(bits)
        state.last_heartbeats[own] = datetime.now(timezone.utc)
        store.requests.clear()
        bits, token, written = backend.set_state(pickle.dumps(state), token)
        assert written and store.requests["get"] == 1 and set(store.requests) == {"get", "add"}
        assert store.requests.total() <= law("store requests of a host of an elastic job", hosts)


@pytest.mark.parametrize("hosts", SIZES)
def test_pipes_and_connections_of_the_launcher(hosts, tmp_path):
    path = tmp_path / "hosts"
    path.write_text("".join(f"h{n}\n" for n in range(hosts)))
    plan = make_plan(parse(["-H", str(path), "--launcher", "ssh", "--dry_run", "t.py"]), {})
    assert isinstance(plan, HostsPlan)
    assert sum(command.lifeline for command in plan.commands) == law("pipes", hosts)
    assert min(WINDOW, hosts) == law("ssh connections", hosts)
