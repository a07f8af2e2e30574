"""Signs of life of the hosts of an elastic job: each host has a key of its own, and is looked after by a few others."""

import pickle
from datetime import datetime, timedelta, timezone

import pytest
from dsx_launch.elastic_beats import WATCHED, Beats
from dsx_launch.elastic_state import JsonState
from dsx_testkit.counting_store import CountingStore
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState


def nodes(count):
    return [_NodeDesc(f"10.0.0.{n:04}", 100, 0) for n in range(count)]


def now():
    return datetime.now(timezone.utc)


def test_hosts_that_give_a_sign_at_the_same_time_all_succeed_and_leave_the_state_as_it_is():
    inner, everybody = HashStore(), nodes(3)
    started = _RendezvousState()
    started.participants = {node: rank for rank, node in enumerate(everybody)}
    stores = [CountingStore(inner) for _ in everybody]
    hosts = [JsonState(store, "job") for store in stores]
    assert hosts[0].set_state(pickle.dumps(started))[2]
    text = inner.get(hosts[0].key)
    states = [host.get_state() for host in hosts]
    for store in stores:
        store.requests.clear()
    for node, host, (bits, token) in zip(everybody, hosts, states, strict=True):
        state, when = pickle.loads(bits), now()
        state.last_heartbeats[node] = when
        bits, _, written = host.set_state(pickle.dumps(state), token)
        assert written and pickle.loads(bits).last_heartbeats[node] == when
    assert inner.get(hosts[0].key) == text
    assert [dict(store.requests) for store in stores] == [{"add": 3, "get": 1}] * 3  # one sign given, two looked at


def test_a_sign_of_life_does_not_hide_that_another_host_has_changed_the_state():
    inner, (one, two) = HashStore(), nodes(2)
    started = _RendezvousState()
    started.participants = {one: 0}
    first, second = JsonState(inner, "job"), JsonState(inner, "job")
    bits, token, _ = first.set_state(pickle.dumps(started))
    state, changed = pickle.loads(bits), pickle.loads(bits)
    changed.wait_list.add(two)
    assert second.set_state(pickle.dumps(changed), token)[2]
    state.last_heartbeats[one] = now()
    bits, token, written = first.set_state(pickle.dumps(state), token)
    assert written and pickle.loads(bits).wait_list == {two} and token == inner.get(first.key)


class Job:
    """Hosts that look after each other, with a clock of their own."""

    def __init__(self, count, every_s=1.0):
        self.time, self.every_s, self.nodes = 0.0, every_s, nodes(count)
        inner = HashStore()
        self.stores = [CountingStore(inner) for _ in self.nodes]
        self.beats = [Beats(store, "beat", every_s, clock=lambda: self.time) for store in self.stores]
        self.alive = set(range(count))

    def round(self):
        """All living hosts give a sign. Returns which of them finds which hosts silent for more than three times."""
        self.time += self.every_s
        found = {}
        for number in self.alive:
            self.beats[number].give(self.nodes[number], now())
        for number in self.alive:
            heard = self.beats[number].heard(self.nodes)
            assert set(heard) == set(self.nodes)
            limit = now() - timedelta(seconds=3.5 * self.every_s)
            silent = {n for n, node in enumerate(self.nodes) if heard[node] < limit}
            if silent:
                found[number] = silent
        return found


@pytest.mark.parametrize("count", [2, 5, 40])
def test_a_lost_host_is_found_by_those_before_it_and_living_ones_never_are(count):
    job = Job(count)
    assert not any(job.round() for _ in range(10))
    job.alive.remove(count - 1)
    found = [job.round() for _ in range(4)]
    assert not any(found[:3])
    before = range(max(0, count - 1 - WATCHED), count - 1)
    assert found[3] == {number: {count - 1} for number in before}


def test_all_of_many_lost_hosts_are_found_by_a_few_that_live():
    job = Job(200)
    job.round()
    job.alive = {7, 8}
    rounds = 0
    while set().union(*job.round().values()) != set(range(200)) - {7, 8}:
        rounds += 1
        assert rounds < 30
    job.nodes = [job.nodes[number] for number in sorted(job.alive)]
    job.beats, job.alive = [job.beats[7], job.beats[8]], {0, 1}
    assert not any(job.round() for _ in range(10))


def test_clocks_of_hosts_may_differ():
    job = Job(3)
    for _ in range(3):
        job.time += 1
        for number in range(3):
            job.beats[number].give(job.nodes[number], now() - timedelta(hours=number))  # what its own clock says
        heard = job.beats[0].heard(job.nodes)
        assert all(now() - heard[node] < timedelta(seconds=3) for node in job.nodes)


@pytest.mark.parametrize("count", [64, 1024])
def test_a_host_asks_a_bounded_number_of_requests_however_many_there_are(count):
    job = Job(count)
    job.beats, job.stores = job.beats[:1], job.stores[:1]
    job.alive = {0}
    for _ in range(2):
        job.stores[0].requests.clear()
        job.round()
        assert dict(job.stores[0].requests) == {"add": 1 + WATCHED}
    for _ in range(10):  # asked again at once: nothing new
        job.beats[0].heard(job.nodes)
    assert dict(job.stores[0].requests) == {"add": 1 + WATCHED}
