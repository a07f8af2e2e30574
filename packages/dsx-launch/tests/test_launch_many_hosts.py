"""Jobs of more than a thousand hosts: what is sent to each, and in what bounds the launcher stays."""

import base64
import json
import os
import random
import shlex
import stat
import string
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from dsx_launch import LaunchError, ResourceError, connections, hosts
from dsx_launch.elastic_hosts import ElasticClients
from dsx_launch.hosts import Clients, start_client
from dsx_launch.node import _parser, job_from
from dsx_launch.options import parse
from dsx_launch.plan import HostsPlan, make_plan
from dsx_launch.resources import decode_world, encode_world
from dsx_launch.runners import BUILDERS, PROGRAMS, Command
from dsx_launch.runners.base import HOSTS_FILE, MOST_ARGUMENT
from dsx_launch.runners.ssh import WINDOW

HOSTS = 1250


def names(count, length=55):
    """Names without a common part, which compress worst."""
    letters = random.Random(1)
    made = ["".join(letters.choices(string.ascii_lowercase + string.digits, k=length)) for _ in range(count)]
    assert len(set(made)) == count
    return made


def plan_for(tmp_path, hosts, launcher):
    path = tmp_path / "hosts"
    path.write_text("".join(f"{host} slots=8\n" for host in hosts))
    words = ["-H", str(path), "--launcher", launcher, "--dry_run", "--num_procs", "8", __file__]
    plan = make_plan(parse(words), {"NCCL_DEBUG": "INFO"})
    assert isinstance(plan, HostsPlan)
    return plan


def stand_in(folder, program):
    """A program that writes its arguments into a file and ends."""
    path = folder / program
    path.write_text(f'#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open("{folder}/seen", "w"))\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("launcher", BUILDERS)
def test_1250_hosts_with_long_names_start(launcher, tmp_path, monkeypatch):
    known = names(HOSTS)
    plan = plan_for(tmp_path, known, launcher)
    assert len(plan.commands) == (HOSTS if launcher == "ssh" else 1)
    assert max(len(word) for command in plan.commands for word in command.argv) < MOST_ARGUMENT
    stand_in(tmp_path, PROGRAMS[launcher])
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    monkeypatch.setenv("PATH", environ["PATH"])  # exec looks for the program there
    process = start_client(plan.commands[-1], environ)
    if process.stdin is not None:
        process.stdin.close()
    assert process.wait(30) == 0
    words = json.loads((tmp_path / "seen").read_text())
    if launcher in ("ssh", "pdsh"):
        words = shlex.split(shlex.split(words[-1])[-1].rpartition("exec ")[2].replace("%%", "%"))
    agent = [word for word in words[words.index("dsx_launch.node") + 1 :] if not word.startswith("--node_rank")]
    job = job_from(_parser().parse_args([f"--node_rank={HOSTS - 1}", *agent]), {})
    assert job.hosts == tuple(known) and job.host_rank == HOSTS - 1 and job.procs == 8


def test_small_jobs_send_plain_json_and_large_ones_compressed():
    few = {f"gpu-node-{n:04}": tuple(map(str, range(8))) for n in range(100)}
    assert len(json.loads(base64.urlsafe_b64decode(encode_world(few)))) == 100
    many = {f"gpu-node-{n:04}.cluster.example.org": tuple(map(str, range(8))) for n in range(10_000)}
    assert len(encode_world(many)) < MOST_ARGUMENT
    assert decode_world(encode_world(many)) == many
    plain = base64.urlsafe_b64encode(json.dumps({host: list(map(int, s)) for host, s in many.items()}).encode())
    assert decode_world(plain.decode()) == many


def test_damaged_compressed_text_is_refused():
    packed = zlib.compress(b'{"a": [0]}')
    assert decode_world(base64.urlsafe_b64encode(packed).decode()) == {"a": ("0",)}
    for bad in (packed[:-3], packed[:6], b"x" + packed, zlib.compress(b"[1]"), zlib.compress(b" " * (1 << 26) + b"{}")):
        with pytest.raises(ResourceError, match="--world_info"):
            decode_world(base64.urlsafe_b64encode(bad).decode())


@pytest.mark.parametrize(
    ("launcher", "option", "line"),
    [
        ("pdsh", "-w", "{}"),
        ("openmpi", "--hostfile", "{} slots=1"),
        ("mpich", "-f", "{}"),
        ("slurm", "--nodelist", "{}"),
    ],
)
def test_a_list_of_hosts_that_is_too_long_for_an_argument_is_a_file(launcher, option, line, tmp_path, monkeypatch):
    known = names(2500)
    (command,) = plan_for(tmp_path, known, launcher).commands
    assert f"{HOSTS_FILE} has 2500 hosts" in command.shell_text()
    # The client reads the file that the option names, as pdsh, mpirun and srun do.
    path = tmp_path / PROGRAMS[launcher]
    path.write_text(
        f"#!{sys.executable}\nimport sys\nname = sys.argv[sys.argv.index({option!r}) + 1].lstrip('^')\n"
        f"assert '/' in name and sys.argv.count(name) < 2\nopen('{tmp_path}/seen', 'w').write(open(name).read())\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    given = Command((*command.argv, HOSTS_FILE), env=command.env, hosts_file=command.hosts_file)  # a word of the user's
    before = set(os.listdir("/proc/self/fd"))
    assert start_client(given, dict(os.environ)).wait(30) == 0
    assert (tmp_path / "seen").read_text() == "".join(line.format(host) + "\n" for host in known)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_short_lists_of_hosts_are_arguments(tmp_path):
    (command,) = plan_for(tmp_path, ["a", "b"], "slurm").commands
    assert command.argv[command.argv.index("--nodelist") + 1] == "a,b" and not command.hosts_file


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich", "slurm"])
def test_what_linux_does_not_start_is_refused_before(launcher, tmp_path):
    with pytest.raises(ResourceError, match=rf"{launcher}, 3000 hosts: one argument .* 131072; .*--no_ssh"):
        plan_for(tmp_path, names(3000), launcher)
    argument = "x" * (MOST_ARGUMENT - 1)  # the longest that there can be
    assert subprocess.run(("true", argument), check=False).returncode == 0
    with pytest.raises(OSError, match="too long"):
        subprocess.run(("true", argument + "x"), check=False)


def test_connections_are_tried_in_a_window_each_with_its_deadline(monkeypatch):
    """128 hosts: exactly 64 are tried at the same time, because 64 wait for each other."""
    lock, together, counts, deadlines = threading.Lock(), threading.Barrier(WINDOW, timeout=60), [0, 0], []

    def run(argv, *, timeout, **options):
        with lock:
            counts[0] += 1
            counts[1] = max(counts)
            deadlines.append(timeout)
        together.wait()
        with lock:
            counts[0] -= 1
        return subprocess.CompletedProcess(argv, 0, stderr="")

    monkeypatch.setattr(connections.subprocess, "run", run)
    connections.check_connections(names(2 * WINDOW), "ssh", parse(["t.py"]), {})
    assert WINDOW == 64 and counts == [0, WINDOW]
    assert deadlines == [connections.SSH_CHECK_S] * (2 * WINDOW)


def test_a_switch_that_is_off_ends_the_check_after_one_window(monkeypatch):
    tried, cancelled = [], threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            cancelled.set()
            super().shutdown(wait=wait)

    def run(argv, *, timeout, **options):
        tried.append(argv[-2])
        if len(tried) > WINDOW:
            assert cancelled.wait(60)
        raise subprocess.TimeoutExpired(argv, timeout)

    monkeypatch.setattr(connections, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(connections.subprocess, "run", run)
    with pytest.raises(LaunchError) as error:
        connections.check_connections(names(1000), "ssh", parse(["t.py"]), {})
    said = str(error.value)
    assert said.count("no answer within 20 s") == connections.SHOWN and "48 more hosts cannot be reached" in said
    assert "hosts were not tried" in said and len(said) < 3_000
    assert WINDOW <= len(tried) <= 3 * WINDOW


def test_hosts_that_do_not_answer_are_named_in_order(tmp_path, monkeypatch):
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\ncase "$*" in *slow*) exec sleep 60;; *bad*) echo no key >&2; exit 255;; esac\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(connections, "SSH_CHECK_S", 3.0)
    connections.check_connections(["a", "b"], "ssh", parse(["t.py"]), {})
    with pytest.raises(LaunchError, match=r"host slow: no answer within 3 s; host bad: no key\. Every host"):
        connections.check_connections(["a", "slow", "b", "bad"], "ssh", parse(["t.py"]), {})


PIPES = """
import resource, sys
from dsx_launch import LaunchError
from dsx_launch.hosts import Clients
from dsx_launch.runners import Command
soft, hard, hosts = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    words = ("sh", "-c", "exec cat > /dev/null")
    clients = Clients([Command(words, host=str(n), lifeline=True) for n in range(hosts)], {})
except LaunchError as error:
    sys.exit(f"refused: {error}")
clients.tell_to_stop(15)
print(clients.wait_all(60), clients.code, resource.getrlimit(resource.RLIMIT_NOFILE)[0] > soft)
"""


def pipes(*numbers):
    words = [sys.executable, "-c", PIPES, *map(str, numbers)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)


def test_the_limit_of_open_files_is_raised_where_the_hosts_need_it():
    assert pipes(40, 400, 80).stdout == "True 0 True\n"
    assert pipes(300, 400, 3).stdout == "True 0 False\n"


def test_more_hosts_than_pipes_are_refused_before_one_is_started():
    refused = pipes(100, 200, 300)
    assert refused.returncode == 1
    assert "open files: got a hard limit of 200, expected at least 3" in refused.stderr
    assert "connections to 300 hosts" in refused.stderr and "--launcher slurm" in refused.stderr


class Gate:
    """Stand-ins for ssh: each has a connection, and so reads its input, when the gate is opened."""

    def __init__(self, folder):
        self.fifo, self.started, self.passing = folder / "gate", folder / "started", folder / "passing"
        os.mkfifo(self.fifo)
        self.started.touch()
        self.passing.touch()

    def command(self, name, then="exec cat"):
        text = f"echo {name} >> {self.started}; exec 3< {self.fifo}; echo {name} >> {self.passing}; cat <&3; {then}"
        return Command(("sh", "-c", text), host=name, lifeline=True)

    def open(self, passed=1):
        """Close it again when so many have passed in all: one may have said that it started, and come here later."""
        gate, until = os.open(self.fifo, os.O_WRONLY), time.monotonic() + 30
        while len(self.passing.read_text().split()) < passed:
            assert time.monotonic() < until
            time.sleep(0.02)
        os.close(gate)

    def seen(self):
        return self.started.read_text().split()


def polled_until(clients, condition, look="poll"):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        getattr(clients, look)()
        time.sleep(0.02)


def test_clients_of_the_job_are_started_in_a_window_of_connections(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "WINDOW", 4)
    gate = Gate(tmp_path)
    clients = Clients([gate.command(f"h{n}") for n in range(10)], dict(os.environ))
    for together in (4, 8, 10):
        polled_until(clients, lambda together=together: len(gate.seen()) == together)
        assert [clients.poll() for _ in range(5)] == [None] * 5 and len(gate.seen()) == together
        gate.open(together)
    assert sorted(gate.seen()) == [f"h{n}" for n in range(10)]
    clients.tell_to_stop(15)
    assert clients.wait_all(30) and clients.code == 0


def test_a_client_that_does_not_connect_in_its_time_ends_the_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(hosts, "WINDOW", 2)
    monkeypatch.setattr(hosts, "CONNECT_S", 0.3)
    monkeypatch.setattr(hosts.log, "propagate", True)
    gate = Gate(tmp_path)
    clients = Clients([gate.command(f"h{n}") for n in range(5)], dict(os.environ))
    polled_until(clients, lambda: clients.code == 255)
    assert clients.wait_all(30) and set(gate.seen()) <= {"h0", "h1"}
    assert "host h0: no connection within 0.3 s" in caplog.text


def test_a_host_of_an_elastic_job_that_does_not_connect_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "CONNECT_S", 0.3)
    gate = Gate(tmp_path)
    first = Command(("cat",), host="h0", lifeline=True)
    clients = ElasticClients([first, gate.command("h1")], dict(os.environ), try_again_s=0.2)
    polled_until(clients, lambda: len(gate.seen()) >= 2, "look")
    monkeypatch.setattr(hosts, "CONNECT_S", 60.0)
    polled_until(clients, lambda: len(clients._codes) == 0, "look")
    assert not clients.look()
    gate.open()
    clients.tell_to_stop(15)
    assert clients.wait_all(30) and clients.outcome == 0


@pytest.mark.parametrize("exports", [{}, {"NAME": "a value" * 100}])
def test_a_client_counts_as_connected_when_it_has_read_its_input(exports, tmp_path):
    gate = Gate(tmp_path)
    command = gate.command("h")
    client = start_client(Command(command.argv, host="h", lifeline=True, exports=exports), dict(os.environ))
    assert not hosts.is_connected(client)
    gate.open()
    until = time.monotonic() + 30
    while not hosts.is_connected(client):
        assert time.monotonic() < until
        time.sleep(0.02)
    client.stdin.close()
    assert client.wait(30) == 0
