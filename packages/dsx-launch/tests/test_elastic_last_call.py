"""A round begins at once when all hosts of the round before are back; else torch's last call decides."""

import threading
import time
from datetime import timedelta

import pytest
from dsx_launch.elastic_rendezvous import ElasticRendezvous
from dsx_launch.elastic_state import JsonState
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout


@pytest.fixture
def hosts():
    """Three hosts whose last call would take an hour, and who give up after some seconds."""
    store = HashStore()
    times = RendezvousTimeout(timedelta(seconds=20), timedelta(hours=1), timedelta(seconds=5))
    made = [
        ElasticRendezvous.from_backend(
            "job", store, JsonState(store, "job"), 1, 4, f"127.0.0.{number + 1}", times, keep_alive_interval=1,
            keep_alive_max_attempt=60,
        )
        for number in range(3)
    ]  # fmt: skip
    yield made
    for one in made:
        one._stop_heartbeats()


def begin(hosts):
    """Let all of them join at the same time; (rank, size) of each, or the error."""
    found = {}

    def join(number, host):
        try:
            round_ = host.next_rendezvous()
            found[number] = round_.rank, round_.world_size
        except RendezvousTimeoutError as error:
            found[number] = error

    threads = [threading.Thread(target=join, args=item) for item in enumerate(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(hosts))]


def knows(host, others):
    host._rounds.known = frozenset(other._this_node for other in others)


def test_hosts_that_know_each_other_do_not_wait_for_the_last_call(hosts):
    for host in hosts[:2]:
        knows(host, hosts[:2])
    assert sorted(begin(hosts[:2])) == [(0, 2), (1, 2)]
    assert sorted(begin(hosts[:2])) == [(0, 2), (1, 2)]  # the second round knows the hosts of the first
    found = []
    third = threading.Thread(target=lambda: found.extend(begin(hosts[2:])))
    third.start()
    while not hosts[0].num_nodes_waiting():
        time.sleep(0.05)
    found += begin(hosts[:2])  # the agents begin a new round because one waits
    third.join()
    assert sorted(found) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.slow
def test_a_host_that_is_missing_is_waited_for(hosts):
    knows(hosts[0], hosts[:2])
    (error,) = begin(hosts[:1])
    assert isinstance(error, RendezvousTimeoutError)
