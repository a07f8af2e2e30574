"""Real agents that are killed, leave and join while a job trains: the losses are those of a run without events.

Each node is a `dsx launch --elastic_training` with one rank, in memory of its own. Its snapshots are removed with it
when it is killed, as a machine's would be.
"""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

BATCH = 24
WAIT_S = 240  # loose: the machine may be busy

SCRIPT = """
import json, os, sys, time
import torch, dsx
from dsx import elasticity

out, updates, pause = sys.argv[-3], int(sys.argv[-2]), float(sys.argv[-1])
CONFIG = {
    "elasticity": {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [2, 4], "version": 0.1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": None,
}

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return torch.sin(torch.arange(3.0) * index), index

elasticity.join(CONFIG)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
engine, _, loader, _ = dsx.initialize(model=model, training_data=Numbers(), config=CONFIG)
run = elasticity.resume(engine, f"{out}/ckpt", snapshot_every=2, save_every=7, memory=f"{out}/memory")
seen = open(f"{out}/seen.{os.getpid()}", "a", buffering=1)
write = lambda **what: seen.write(json.dumps(what) + chr(10))
write(began=engine.global_steps, source=run.source, world=dsx.comm.get_world_size(), rank=engine.global_rank)
while engine.global_steps < updates:
    for x, number in loader:
        losses = (engine(x).squeeze(1) - x.sum(1)).square()
        step = engine.global_steps
        write(step=step, pairs=list(zip(number.tolist(), losses.tolist())))
        engine.backward(losses.mean())
        engine.step()
        if engine.global_steps > step:
            time.sleep(pause)
        if engine.global_steps >= updates:
            break
engine.save_checkpoint(f"{out}/ckpt")
engine.destroy()
"""


class Cluster:
    """Nodes on this machine, and what their ranks have written."""

    def __init__(self, folder, updates, pause, most=4, script=SCRIPT):
        self.folder, self.nodes = folder, []
        self._script = folder / "train.py"
        self._script.write_text(textwrap.dedent(script))
        self._arguments = [str(self._script), str(folder), str(updates), str(pause)]
        self._most = most
        self._store, self._port = None, 0

    def add(self, **variables):
        """Start a node."""
        return self._start(
            "--no_ssh", "--num_procs", "1", "--min_elastic_nodes", "1", "--max_elastic_nodes", str(self._most),
            "--master_addr", "127.0.0.1", "--master_port", str(self._meet()), **variables,
        )  # fmt: skip

    def add_alone(self, ranks):
        """Start a node that is the whole job."""
        return self._start("--num_procs", str(ranks))

    def _meet(self):
        """The port of the process that holds the rendezvous."""
        if self._store is None:
            holder = [sys.executable, "-m", "dsx", "elastic", "--rendezvous", "0"]
            self._store = subprocess.Popen(holder, stdout=subprocess.PIPE, text=True)
            self._port = int(self._store.stdout.readline().split()[-1])
        return self._port

    def _start(self, *options, **variables):
        log = open(self.folder / f"log.{len(list(self.folder.glob('log.*')))}", "w")  # noqa: SIM115
        command = [sys.executable, "-m", "dsx.launcher", "--elastic_training", *options, *self._arguments]
        env = {**os.environ, **variables}
        node = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=env)
        self.nodes.append(node)
        return node

    def kill_node(self, node):
        """A machine is lost, with its memory."""
        self.nodes.remove(node)
        node.kill()
        node.wait()
        for memory in (self.folder / "memory").glob(f"*/{socket.gethostname()}-{node.pid}"):
            shutil.rmtree(memory, ignore_errors=True)

    def kill_rank(self, node):
        """A rank is killed, its machine stays."""

        def ranks():  # those that train: other children have loaded torch only, or do so
            children = psutil.Process(node.pid).children()
            return [child for child in children if (self.folder / f"seen.{child.pid}").exists()]

        self.until("the node has no rank", ranks)
        ranks()[-1].kill()

    def ask_to_leave(self, node):
        """A machine is taken away after a word."""
        self.nodes.remove(node)
        node.terminate()

    def records(self):
        """What each rank process has written, oldest process first; a line that a kill has cut is left out."""
        found = []
        for path in sorted(self.folder.glob("seen.*"), key=lambda path: path.stat().st_ctime_ns):
            lines = path.read_text().splitlines()
            records = []
            for line in lines:
                try:
                    records.append(json.loads(line))
                except ValueError:
                    continue
            found.append(records)
        return found

    def latest(self):
        """The last update that any rank has begun; -1: none."""
        return max((record.get("step", -1) for records in self.records() for record in records), default=-1)

    def until(self, what, condition):
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self):
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("log.*")))

    def settle(self):
        """Wait until the job has got on a little."""
        mark = self.latest()
        self.until("the job did not get on", lambda: self.latest() >= mark + 3 or self.ended())

    def ended(self):
        return bool(self.nodes) and all(node.poll() is not None for node in self.nodes)

    def finish(self):
        self.until("the job did not end", self.ended)
        return [node.returncode for node in self.nodes]

    def close(self):
        for node in self.nodes:
            node.kill()
            node.wait()
        if self._store is not None:
            self._store.terminate()
            self._store.wait()


@pytest.fixture
def cluster(tmp_path):
    made = []

    def make(updates, pause, **options):
        made.append(Cluster(tmp_path, updates, pause, **options))
        return made[0]

    yield make
    for one in made:
        one.close()


def expected_losses(updates):
    """The same training by plain torch, in one process."""
    import torch
    from dsx_data import LoaderOptions, TrainingLoader

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    data = [(torch.sin(torch.arange(3.0) * index), index) for index in range(100)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    loader, found = TrainingLoader(data, LoaderOptions(BATCH, global_batch=BATCH)), []
    while len(found) < updates:
        for x, number in loader:
            losses = (model(x).squeeze(1) - x.sum(1)).square()
            found.append(sorted(zip(number.tolist(), losses.tolist())))
            optimizer.zero_grad()
            losses.mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return found


def check(cluster, updates):
    """Every attempt at an update had parts of its samples and no others, the last one all of them; losses are equal."""
    attempts = {}
    for records in cluster.records():
        for record in records:
            if "step" in record:
                attempts.setdefault(record["step"], []).extend(map(tuple, record["pairs"]))
    expected = expected_losses(updates)
    assert sorted(attempts) == list(range(updates))
    for step, pairs in attempts.items():
        numbers = [number for number, _ in expected[step]]
        assert {number for number, _ in pairs} == set(numbers), step
        wanted = dict(expected[step])
        for number, loss in pairs:
            assert numbers.count(number) > 1 or loss == pytest.approx(wanted[number], rel=1e-4, abs=1e-5), (
                step,
                number,
            )


def test_a_rank_is_killed_and_all_go_on_from_memory(cluster):
    job = cluster(8, 0.2)
    node = job.add_alone(2)
    job.settle()
    job.kill_rank(node)
    assert job.finish() == [0], job.logs()
    check(job, 8)
    assert [records[0]["source"] for records in job.records() if records] == ["", "", "memory", "memory"]
    assert re.search(r"localhost: update \d+ is done .* stopping .*, loading from memory .*, first update", job.logs())


SLOW = """
import json, os, pathlib, sys, time
import torch, dsx
from dsx import elasticity

out = sys.argv[-3]
CONFIG = {
    "elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [4], "version": 0.1,
                   "replace_stragglers": 2},
    "straggler": {"enabled": True, "every": 3},
    "jsonl": {"enabled": True, "output_path": out, "job_name": "run"},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}

class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(float(os.environ.get("SLOW", "0")))
        return super().forward(x)

elasticity.join(CONFIG)
model = Slow(4, 1)
data = [(torch.ones(4), torch.ones(1))] * 64
engine, _, loader, _ = dsx.initialize(model=model, training_data=data, config=CONFIG)
run = elasticity.resume(engine, f"{out}/ckpt", memory=f"{out}/memory")
world, began = dsx.comm.get_world_size(), engine.global_steps
before = [json.loads(path.read_text())["world"] for path in pathlib.Path(out).glob("seen.*")]
last = began + 3 if world == 1 and 2 in before else 10**9  # the other node has come and has left
with open(f"{out}/seen.{os.getpid()}", "w") as seen:
    seen.write(json.dumps(dict(began=began, world=world)))
while engine.global_steps < last:
    for x, y in loader:
        engine.backward((engine(x) - y).square().mean())
        engine.step()
        time.sleep(0.01)
        if engine.global_steps >= last:
            break
engine.save_checkpoint(f"{out}/ckpt")
engine.destroy()
"""


def test_a_slow_node_is_named_in_log_file_and_monitor_and_leaves_the_job(cluster):
    job = cluster(0, 0, script=SLOW)
    first = job.add()
    job.until("the first node did not begin", job.records)
    second = job.add(SLOW="0.2")
    assert job.finish() == [0, 75], job.logs()
    logs = [(job.folder / f"log.{number}").read_text() for number in range(2)]
    (slow, fast) = (0, 1) if "its node leaves the job" in logs[0] else (1, 0)
    assert (first, second)[slow].returncode == 75
    named = re.search(r"rank (\d) holds the others up in forward", "".join(logs))
    assert named and f"rank {named[1]} holds the others up in forward" in logs[slow]
    assert "2 times in a row: its node leaves the job" in logs[slow] and "leaves the job" not in logs[fast]
    lines = [json.loads(line) for line in (job.folder / "run" / "stragglers.jsonl").read_text().splitlines()]
    assert any(f"rank {named[1]} holds the others up in forward" in text for line in lines for text in line["found"])
    events = "".join(path.read_text() for path in (job.folder / "run").rglob("*") if path.is_file())
    assert "Train/Stragglers/rank" in events and "Train/Stragglers/excess_ms_forward" in events
    worlds = [records[0]["world"] for records in job.records() if records]
    assert worlds[-1] == 1 and 2 in worlds, "the other one goes on alone"


@pytest.mark.slow
def test_a_rank_and_a_node_are_killed_one_joins_and_one_leaves(cluster):
    job = cluster(48, 0.25)
    first, second = job.add(), job.add()
    job.settle()
    job.kill_rank(second)
    job.settle()
    third = job.add()
    job.until("the third node did not join", lambda: any(r[0].get("world") == 3 for r in job.records() if r))
    job.settle()
    job.kill_node(first)  # with what it held
    job.settle()
    job.ask_to_leave(second)
    assert job.finish() == [0], job.logs()
    assert third.returncode == 0
    check(job, 48)
    sources = [records[0]["source"] for records in job.records() if records]
    assert "memory" in sources and sources[0] == ""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # twenty changes, of which each may take half a minute on a busy machine
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_random_events(cluster, seed):
    random_, job, updates = random.Random(seed), cluster(400, 0.2), 400
    for _ in range(3):
        job.add()
    for _ in range(20):
        job.settle()
        if job.ended():
            break
        node = random_.choice(job.nodes)
        many, few = len(job.nodes) > 3, len(job.nodes) < 2
        event = random_.choice([job.kill_rank] if few else [job.kill_rank, job.kill_node, job.ask_to_leave])
        if few or (not many and random_.random() < 0.4):
            job.add()
        else:
            event(node)
    job.finish()
    assert 0 in [node.returncode for node in job.nodes], job.logs()
    check(job, updates)
