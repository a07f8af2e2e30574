"""Kills a rank at a random moment of random collectives, again and again, and looks at what the others do.

    python packages/dsx-comm/bench/kill_trials.py --trials 50 [--ranks 3] [--seed 0]

A trial: fresh processes in a group of the "dsx" backend (rank 0 may be the one: the store is in a process of its own),
a random stream of collectives (synchronous, asynchronous, sends, symmetric memory, a sub-group's), SIGKILL for a random
rank after up to a second. Passed: every other rank raises a `dsx_comm.CommError` that names the killed rank, within 5 s
of the kill; afterwards nothing new lies in /dev/shm, and no abstract socket of the transport is left. Prints one line a
trial that failed and a summary; exit code 1 if any did.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import random
import re
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import dsx_comm
import torch
import torch.distributed as dist
from dsx_testkit.results import Table, add_json_option

LIMIT = 5.0
SIZES = (1, 1000, 70_000, 1_500_000)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "sub", "send")
FORK = multiprocessing.get_context("fork")


class Calls:
    """A stream of collectives, the same on every rank for a seed."""

    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        self.rank, self.ranks, self.chosen = rank, ranks, random.Random(seed)
        self.kind = ""  # of the call under way
        self.sub = dist.new_group([0, 1])
        self.plain = [torch.ones(s * ranks) for s in SIZES]
        self.shared = [dsx_comm.empty(s * ranks) for s in SIZES]

    def next(self) -> list[Any]:
        """Issue the next call, or two asynchronous ones at once; their handles."""
        self.kind = self.chosen.choice(KINDS)
        if self.chosen.random() < 0.4:
            return [self.issue(self.kind, True) for _ in range(2)]
        return [self.issue(self.kind, False)]

    def issue(self, kind: str, later: bool) -> Any:
        """One call; its handle, or None when it is over."""
        i = self.chosen.randrange(len(SIZES))
        on = (self.shared if self.chosen.random() < 0.5 else self.plain)[i]
        part, out, most = on[: SIZES[i]], torch.empty(SIZES[i] * self.ranks), dist.ReduceOp.MAX
        if kind == "all_reduce":
            return dist.all_reduce(on, most, async_op=later)
        if kind == "all_gather":
            return dist.all_gather_into_tensor(out, part, async_op=later)
        if kind == "reduce_scatter":
            return dist.reduce_scatter_tensor(out[: SIZES[i]], on, most, async_op=later)
        if kind == "all_to_all":
            return dist.all_to_all_single(out, on, async_op=later)
        if kind == "broadcast":
            return dist.broadcast(on, self.chosen.randrange(self.ranks), async_op=later)
        if kind == "sub" and self.rank < 2:
            dist.all_reduce(on, most, group=self.sub)
        if kind in ("barrier", "sub"):
            return dist.barrier(async_op=later)
        send = dist.isend(part, (self.rank + 1) % self.ranks)
        receive = dist.irecv(out[: SIZES[i]], (self.rank - 1) % self.ranks)
        for work in (send, receive):
            if work is not None:
                work.wait()
        return None


def job(rank: int, ranks: int, port: int, seed: int, said: Connection) -> None:
    """A rank: calls until one fails; says "ready", then (time, kind of call, kind of error, text)."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(20)  # whoever does not get ready says where it is
    store = dist.PrefixStore(
        str(seed), dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    )
    dist.init_process_group("dsx", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    calls = Calls(rank, ranks, seed)
    faulthandler.cancel_dump_traceback_later()
    said.send("ready")
    try:
        while True:
            for work in calls.next():
                if work is not None:
                    work.wait()
    except dsx_comm.CommError as error:
        said.send((time.time(), calls.kind, type(error).__name__, str(error)))
    os._exit(0)


@dataclass
class Outcome:
    """What became of one trial: seconds until the last survivor's error, and what is wrong (empty: nothing)."""

    seconds: float
    problems: list[str]


def keep_store(said: Connection) -> None:
    """A process that serves the store: says its port, and stays."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    said.send(store.port)
    while True:
        time.sleep(60)


def sockets() -> int:
    """Abstract sockets of the transport on this machine."""
    with open("/proc/net/unix") as f:
        return f.read().count("dsx-comm-")


def trial(ranks: int, seed: int, port: int) -> Outcome:
    """Start, kill, look."""
    generator = random.Random(seed)
    before, listening = set(os.listdir("/dev/shm")), sockets()
    pipes = [FORK.Pipe(duplex=False) for _ in range(ranks)]
    jobs = [FORK.Process(target=job, args=(r, ranks, port, seed, pipes[r][1])) for r in range(ranks)]
    for each in jobs:
        each.start()
    for _, writer in pipes:
        writer.close()
    problems, last = [], 0.0
    try:
        for reader, _ in pipes:
            if not reader.poll(60) or reader.recv() != "ready":
                return Outcome(0.0, ["a rank did not start"])
        victim = generator.randrange(ranks)
        time.sleep(generator.random())
        jobs[victim].kill()
        killed = time.time()
        for rank, (reader, _) in enumerate(pipes):
            if rank != victim:
                seconds, found = look(rank, reader, victim, killed)
                last = max(last, seconds)
                problems += found
    except EOFError:
        problems.append("a rank ended without an error of this package")
    finally:
        for each in jobs:
            each.kill()
            each.join()
    left = set(os.listdir("/dev/shm")) - before
    if left:
        problems.append(f"left in /dev/shm: {sorted(left)}")
    if sockets() > listening:
        problems.append("a socket is left")
    return Outcome(last, problems)


def look(rank: int, said: Connection, victim: int, killed: float) -> tuple[float, list[str]]:
    """(seconds until the rank's error, what is wrong with it)."""
    if not said.poll(30):
        return 30.0, [f"rank {rank} was still there after 30 s"]
    when, call, kind, text = said.recv()
    seconds = when - killed
    problems = []
    if not re.search(rf"rank(\(s\))? (\d+, )*{victim}\b", text):
        problems.append(f"rank {rank} in {call} does not name rank {victim}: {kind} {text}")
    if seconds > LIMIT:
        problems.append(f"rank {rank} took {seconds:.1f} s")
    return seconds, problems


def main() -> int:
    """Run the trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    args = parser.parse_args()
    outcomes = []
    reader, writer = FORK.Pipe(duplex=False)
    # not in this process: a rank forked beside a running thread of torch's store now and then hangs in its constructor
    FORK.Process(target=keep_store, args=(writer,), daemon=True).start()
    port = reader.recv()
    for seed in range(args.seed, args.seed + args.trials):
        outcomes.append(trial(args.ranks, seed, port))
        if outcomes[-1].problems:
            print(f"trial {seed}: {'; '.join(outcomes[-1].problems)}", flush=True)
    failed = sum(bool(o.problems) for o in outcomes)
    seconds = sorted(o.seconds for o in outcomes)
    seen = ("median s to the last rank's error", "longest s to the last rank's error")
    table = Table({"trials": "", "ranks": "", "failed": "", **dict.fromkeys(seen, "{:.2f}")})
    table.add(len(outcomes), args.ranks, failed, statistics.median(seconds), seconds[-1])
    table.goal(f"every rank names the killed one within {LIMIT:.0f} s", f"{failed} trials failed", met=not failed)
    table.save(args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
