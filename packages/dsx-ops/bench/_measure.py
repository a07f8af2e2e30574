"""What the benches here share: contenders, interleaved rounds, medians, goals, one Markdown table.

Every round runs every contender of a job once, in a new order, and medians are compared: what disturbs the machine for
a moment disturbs all.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import dsx_ops
import torch
from dsx_ops import native
from dsx_testkit.results import Table, add_json_option

TOUCH = 7  # native/include/dsx_ops/kernels.h
Step = Callable[[], object]


@dataclass
class Contender:
    """One way of doing a job; `nbytes` is what it must move at least."""

    name: str
    nbytes: float
    step: Step


@dataclass
class Goal:
    """`ours` must be at least `times` as good as `peer`: in time, or (`rate`) in bytes per second."""

    ours: str
    peer: str
    times: float
    rate: bool = False


@dataclass
class Job:
    """Contenders that are measured together, and what is to come out."""

    contenders: list[Contender]
    goals: list[Goal] = field(default_factory=list)


def copy_contender(nbytes: int) -> Contender:
    """torch's copy_ between two buffers that together have `nbytes`."""
    a, b = torch.ones(nbytes // 8), torch.zeros(nbytes // 8)
    return Contender("torch copy_", 8.0 * a.numel(), lambda: b.copy_(a))


def stream_contender(streams: list[torch.Tensor]) -> Contender | None:
    """Adam's four reads and three writes with next to no arithmetic (the second is added to the others): the ceiling of
    a plain fp32 step.
    """
    module = native.module()
    if module is None:
        return None
    total = streams[0].numel()
    table = array("q", [*(t.data_ptr() for t in streams), 0, 0, 0, 0, total, 0])

    def touch(keep: object = streams) -> None:
        module.step(TOUCH, table, [0, 0, 0, 4], [0.0] * 11, 0, 0, torch.get_num_threads())

    return Contender("stream: 4 read, 3 written", 28.0 * total, touch)


def keep_memory() -> None:
    """Let malloc keep what is freed: else every operator that returns a large tensor measures the page faults of new
    memory.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def measure(contenders: list[Contender], rounds: int) -> dict[str, float]:
    """Median seconds per contender over interleaved rounds."""
    for c in contenders:
        c.step(), c.step()
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    shuffled = random.Random(0)
    for _ in range(rounds):
        order = contenders[:]
        shuffled.shuffle(order)
        for c in order:
            start = time.perf_counter()
            c.step()
            times[c.name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def judge(table: Table, goal: Goal, nbytes: dict[str, float], medians: dict[str, float]) -> None:
    """The goal, what was measured, met or not; nothing when one of the two did not run."""
    if goal.ours not in medians or goal.peer not in medians:
        return
    ratio = medians[goal.peer] / medians[goal.ours]
    if goal.rate:
        ratio *= nbytes[goal.ours] / nbytes[goal.peer]
    kind = "the bandwidth of" if goal.rate else "the speed of"
    table.goal(f"{goal.ours} at least {goal.times:.2f}x {kind} {goal.peer}", f"{ratio:.2f}x", met=ratio >= goal.times)


def run_jobs(jobs: dict[str, Callable[[int], Job]], description: str | None, elements: int) -> int:
    """Parse the command line, run the jobs, print the table and the goals."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=elements)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--jobs", nargs="*", choices=list(jobs), default=list(jobs), help="which (default: all)")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    isa = dsx_ops.native_status()["isa"]
    print(f"torch {torch.__version__}, {options.threads} threads, isa {isa}, {options.elements} elements, "
          f"median of {options.rounds}")  # fmt: skip
    table = Table({"job": "", "contender": "", "ms": "{:.2f}", "GB/s": "{:.1f}"})
    judged: list[tuple[Goal, dict[str, float], dict[str, float]]] = []
    for name in options.jobs:
        job = jobs[name](options.elements)
        medians = measure(job.contenders, options.rounds)
        for c in job.contenders:
            table.add(name, c.name, medians[c.name] * 1e3, c.nbytes / medians[c.name] / 1e9)
        nbytes = {c.name: c.nbytes for c in job.contenders}
        judged += [(goal, nbytes, medians) for goal in job.goals]
        del job  # its tensors go before the next job's come
    for goal, nbytes, medians in judged:
        judge(table, goal, nbytes, medians)
    table.save(options.json)
    return 0
