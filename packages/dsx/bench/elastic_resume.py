"""How long an elastic job takes from a loss to its next update.

    python packages/dsx/bench/elastic_resume.py [--losses 5] [--what rank|host] [--small] [--json FILE]

A GPT of 19 M parameters, ZeRO stage 2, two ranks of one thread. `--what rank`: one host, and a rank is killed again and
again. `--what host`: two hosts of one rank (two agents on this machine), and one of them is killed without a word, with
its snapshots; another one is started when the job has got on. Printed: seconds from the kill to the end of the next
update, by the script's own clock, beside the goal; and what the launcher's log says of the phases. `--small` takes a
tiny model, to see that it runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dsx_testkit.results import Table, add_json_option

GOAL_S = 10.0
WAIT_S = 300.0
CONFIG = {
    "elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [4], "version": 0.1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": None,
}
SMALL = {"width": 64, "layers": 2, "heads": 2, "length": 32}
_PHASES = re.compile(r"after the change was noticed: (.*)")


def train(out: Path, small: bool) -> None:
    """The program of the job. Writes the time of every update to a file of this process."""
    from dsx import elasticity

    elasticity.join(CONFIG)
    import dsx
    import torch
    from dsx_testkit.benches import GPT

    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = SMALL if small else {}
    tokens = torch.randint(0, 256, (512, sizes.get("length", 128) + 1))
    data = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    engine, _, loader, _ = dsx.initialize(model=GPT(**sizes), training_data=data, config=CONFIG)
    elasticity.resume(engine, out / "ckpt", snapshot_every=2, memory=out / "memory")
    with (out / f"updates.{os.getpid()}").open("a", buffering=1) as said:
        while True:
            for ids, targets in loader:
                before = engine.global_steps
                engine.backward(engine(ids, targets))
                engine.step()
                if engine.global_steps > before:
                    said.write(f"{time.time()} {engine.global_steps}\n")


class Job:
    """A job on this machine, as a user starts it."""

    def __init__(self, out: Path, options: argparse.Namespace) -> None:
        self.out, self._options = out, options
        self._agents: list[subprocess.Popen[str]] = []
        self._store: subprocess.Popen[str] | None = None
        self._port = 0
        if options.what == "host":
            holder = [sys.executable, "-m", "dsx", "elastic", "--rendezvous", "0"]
            self._store = subprocess.Popen(holder, stdout=subprocess.PIPE, text=True)
            assert self._store.stdout is not None
            self._port = int(self._store.stdout.readline().split()[-1])

    def start(self) -> None:
        """Start an agent: the only one, or one more."""
        words = ["--elastic_training", "--no_local_rank", "--restarts", "100"]
        words += ["--num_procs", "2"] if self._store is None else [
            "--num_procs", "1", "--no_ssh", "--max_elastic_nodes", "2", "--master_addr", "127.0.0.1",
            "--master_port", str(self._port),
        ]  # fmt: skip
        words += [str(Path(__file__).resolve()), "--train", str(self.out)]
        words += ["--small"] if self._options.small else []
        log = (self.out / f"log.{len(self._agents)}").open("w")
        command = [sys.executable, "-m", "dsx.launcher", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._agents.append(subprocess.Popen(command, stderr=log, env=env, start_new_session=True, text=True))

    def updates(self) -> Iterator[tuple[float, int]]:
        """Time and process of each update so far."""
        for path in self.out.glob("updates.*"):
            for line in path.read_text().splitlines():
                yield float(line.split()[0]), int(path.suffix[1:])

    def wait(self, since: float, processes: int) -> float:
        """Wait until so many processes have done an update that began after `since`; when the first of them did."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            done: dict[int, float] = {}
            for when, process in sorted(self.updates()):
                if when > since:
                    done.setdefault(process, when)
            if len(done) >= processes:
                return min(done.values())
            time.sleep(0.02)
        raise TimeoutError("the job does not get on:\n" + self.logs())

    def lose(self) -> float:
        """Kill a rank, or a host with what it remembers. Returns the time."""
        agent = self._agents[-1]
        newest = max(self.updates())[0]
        if self._store is None:
            living = [process for when, process in self.updates() if when > newest - 1 and _lives(process)]
            now = time.time()
            os.kill(max(living), signal.SIGKILL)
            return now
        now = time.time()
        agent.kill()
        agent.wait()
        for folder in (self.out / "memory").glob(f"*/{socket.gethostname()}-{agent.pid}"):
            shutil.rmtree(folder, ignore_errors=True)
        return now

    def phases(self) -> list[dict[str, float]]:
        """What the launchers' logs say of each time."""
        found = []
        for text in _PHASES.findall(self.logs()):
            pairs = (part.rpartition(" ") for part in text.split(", "))
            found.append({name: float(seconds) for name, _, seconds in pairs})
        return found

    def logs(self) -> str:
        """All that the launchers have said."""
        return "\n".join(path.read_text() for path in sorted(self.out.glob("log.*")))

    def close(self) -> None:
        """End everything."""
        for process in (*self._agents, self._store):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def _lives(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def measure(job: Job, losses: int) -> list[float]:
    """Seconds from each loss to the next update."""
    hosts = job._options.what == "host"
    job.start()
    if hosts:
        job.start()
    job.wait(0.0, 2)
    found = []
    for number in range(losses):
        job.wait(time.time() + 2.0, 2)  # the next snapshot is there, and nothing else is going on
        lost = job.lose()
        found.append(job.wait(lost + 0.5, 1 if hosts else 2) - lost)  # what ran at the loss is over by then
        print(f"  {number + 1}/{losses}: {found[-1]:.1f} s", flush=True)
        if hosts:
            since = time.time()
            job.start()
            job.wait(since + 1.0, 2)
    return found


def report(seconds: list[float], phases: list[dict[str, float]], options: argparse.Namespace) -> None:
    """Print and write the figures."""
    median, worst = statistics.median(seconds), max(seconds)
    table = Table({"lost": "", "losses": "", "median s": "{:.1f}", "worst s": "{:.1f}"})
    table.add(f"a {options.what}", len(seconds), median, worst)
    table.goal(f"at most {GOAL_S:g} s on 2 cores", f"{worst:.1f} s at most", met=worst <= GOAL_S)
    table.save(options.json)
    parts = Table({"phase": "", "median s": "{:.1f}"}, name="phases")
    for name in dict.fromkeys(name for one in phases for name in one):
        parts.add(name, statistics.median(one[name] for one in phases if name in one))
    parts.save(options.json)


def main() -> None:
    """Parse arguments; run a job, lose ranks or hosts, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=5, help="how often")
    parser.add_argument("--what", choices=("rank", "host"), default="rank", help="what is lost")
    parser.add_argument("--small", action="store_true", help="a tiny model: only to see that it runs")
    add_json_option(parser)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.small)
        return
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name), options)
        try:
            report(measure(job, options.losses), job.phases(), options)
        finally:
            job.close()


if __name__ == "__main__":
    main()
