"""What others may do to the store in which agents of an elastic job meet: at most end the job, never run code in it.

The state is JSON. A job on one host has no such store that anybody could reach, and nothing of it listens beyond the
machine's loopback.
"""

import os
import pickle
import socket
import subprocess
import sys
import textwrap
from datetime import datetime, timedelta, timezone

import pytest
from dsx_launch.elastic_rendezvous import ElasticRendezvous
from dsx_launch.elastic_state import JsonState, state_from_text, text_of_state
from dsx_launch.listening import ADDRESS_VARIABLE, listen_at
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout, _NodeDesc, _RendezvousState

EMPTY = text_of_state(_RendezvousState())


class Payload:
    """A pickle that leaves a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def full_state():
    state = _RendezvousState()
    state.round, state.complete, state.closed = 7, True, True
    one, two, three = (_NodeDesc(f"10.0.0.{n}", 100 + n, n) for n in range(3))
    now = datetime.now(timezone.utc)
    state.deadline = now + timedelta(seconds=3)
    state.participants = {two: 1, one: 0}
    state.wait_list, state.redundancy_list = {three}, {one}
    state.last_heartbeats = {one: now, two: now - timedelta(seconds=2)}
    return state


def test_a_state_comes_back_as_it_was():
    for state in (_RendezvousState(), full_state()):
        back = state_from_text(text_of_state(state))
        assert vars(back) == vars(state) | {"last_heartbeats": {}}  # those are not part of the text
        assert list(back.participants) == list(state.participants)


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "[" * 100_000, '{"round": 0}', EMPTY.replace("false", "0"),
        EMPTY.replace("null", '"yesterday"'),
        EMPTY.replace("null", '"2026-01-01T00:00:00"'), EMPTY.replace('"wait_list": []', '"wait_list": [["a", 1]]'),
        EMPTY.replace('"participants": []', '"participants": [[]]'), EMPTY.replace("}", ', "more": 1}'),
        EMPTY.replace('"round": 0', '"round": 1e999'), EMPTY.replace('"participants": []', '"participants": {"a": 1}'),
        " " * (1 << 24) + EMPTY,
    ],
    ids=range(14),
)  # fmt: skip
def test_what_is_not_exactly_a_state_is_refused(text):
    store = HashStore()
    backend = JsonState(store, "job")
    store.set(backend.key, text)
    with pytest.raises(RendezvousStateError, match="not part of the job"):
        backend.get_state()


def test_agents_never_load_a_pickle_from_the_store(tmp_path):
    store, path = HashStore(), tmp_path / "executed"
    backend = JsonState(store, "job")
    times = RendezvousTimeout(timedelta(seconds=5), timedelta(seconds=1), timedelta(seconds=5))
    agent = ElasticRendezvous.from_backend(
        "job", store, backend, 1, 1, "127.0.0.1", times, keep_alive_interval=1, keep_alive_max_attempt=60
    )
    for key in (backend.key, "torch.rendezvous.job"):
        store.set(key, pickle.dumps(Payload(path), protocol=0))
    with pytest.raises(RendezvousStateError, match="not part of the job"):
        agent.next_rendezvous()
    agent._stop_heartbeats()
    assert not path.exists()


def test_of_two_agents_only_one_writes_a_state():
    store = HashStore()
    first, second = JsonState(store, "job"), JsonState(store, "job")
    assert first.get_state() is None
    bits, token, written = first.set_state(pickle.dumps(full_state()))
    assert written and vars(pickle.loads(bits)) == vars(full_state()) | {
        "deadline": pickle.loads(bits).deadline, "last_heartbeats": pickle.loads(bits).last_heartbeats
    }  # fmt: skip
    there, _, written = second.set_state(pickle.dumps(_RendezvousState()))
    assert not written and pickle.loads(there).round == 7
    assert second.set_state(pickle.dumps(_RendezvousState()), token)[2]


LISTENERS = """
import os, psutil, torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
found = {
    connection.laddr.ip
    for process in (psutil.Process(), psutil.Process(os.getppid()))
    for connection in process.net_connections("inet")
    if connection.status == psutil.CONN_LISTEN
}
dist.barrier()
os.write(1, f"listens at {sorted(found)}\\n".encode())  # in one piece: two ranks write
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the name of the loopback is Linux'")
@pytest.mark.parametrize("options", [[], ["--elastic_training"]], ids=["ordinary", "elastic"])
def test_a_job_on_one_host_is_not_reached_from_the_network(tmp_path, options):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(LISTENERS))
    command = [sys.executable, "-m", "dsx_launch", *options, "--num_procs", "2", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["listens at ['127.0.0.1']"] * 2


def test_a_socket_listens_where_the_others_connect(monkeypatch):
    def at(address, **environ):
        with listen_at(address, 0, environ) as found:
            return found.getsockname()[0]

    assert at("127.0.0.1") == at("localhost") == "127.0.0.1"
    assert at("") in ("::", "0.0.0.0")
    assert at("203.0.113.7") in ("::", "0.0.0.0")  # of no interface: behind a translation of addresses
    assert at("203.0.113.7", **{ADDRESS_VARIABLE: "127.0.0.1"}) == "127.0.0.1"
    with pytest.raises(OSError, match="assign"):
        at("127.0.0.1", **{ADDRESS_VARIABLE: "203.0.113.7"})
    # Debian gives a host its own name at 127.0.1.1: the others know it by another address
    known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", lambda *_, **__: known)
        assert at("node-0") in ("::", "0.0.0.0")
    assert at("no-such-name.invalid") in ("::", "0.0.0.0")  # not yet: the names of pods come with the pods
    with listen_at("127.0.0.1", 0, {}) as first, pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", first.getsockname()[1], {})


def test_the_store_of_many_jobs_listens_where_it_is_told():
    pytest.importorskip("dsx", reason="the command is part of dsx")
    command = [sys.executable, "-m", "dsx", "elastic", "--rendezvous", "0", "--address", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        port = int(holder.stdout.readline().split()[-1])
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        taken = subprocess.run(
            [*command[:5], str(port), *command[6:]], capture_output=True, text=True, timeout=60, check=False
        )
        holder.kill()
    assert taken.returncode == 1 and f"cannot listen at 127.0.0.1:{port}" in taken.stderr
    alone = subprocess.run(
        [*command[:4], "--config", os.devnull, "--address", "::1"], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert alone.returncode == 2 and "--address without --rendezvous" in alone.stderr
