"""Microseconds until every rank has five numbers of every other rank, over gloo: torch's all-gather beside
`dsx_comm.all_gather_in_rounds`.

    python packages/dsx-comm/bench/small_gather.py
    python packages/dsx-comm/bench/small_gather.py --ranks 2,64

torch's all-gather sends N - 1 messages of each rank one after the other, rounds send ceil(log2 N). dsx_zero sends such
words once per step. Both are timed in turn, `--calls` on end; a row has the medians of `--rounds` rounds on rank 0.

All ranks share this machine's cores, which are busy all the time, so a row says what all messages of all ranks cost
together. Divided by their number this is what one message costs a core. The last rows are an estimate for ranks with a
core each: the messages that follow one another, at that cost, as the row with the most ranks has it. The latency of a
network comes on top, once per message.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from dsx_comm.doubling import rounds
from dsx_testkit import run_ranks
from dsx_testkit.results import Table, add_json_option

NUMBERS = 5
"""The size of dsx_zero's word."""
ESTIMATED = (128, 1024)


def measured(rank: int, world: int, repeats: int, calls: int) -> list[float]:
    """Microseconds per call: torch's, and in rounds."""
    import dsx_comm
    import torch.distributed as dist

    mine, rows = torch.full((NUMBERS,), rank), torch.empty(world * NUMBERS, dtype=torch.int64)
    ring = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    lane = dsx_comm.StepLane()
    ways = (lambda: ring(rows, mine), lambda: dsx_comm.all_gather_in_rounds(rows, mine, lane=lane))
    samples: list[list[float]] = [[], []]
    for _ in range(repeats + 1):  # the first round warms up
        for times, call in zip(samples, ways):
            dist.barrier()
            rows.fill_(-1)
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - begin) * 1e6 / calls)
            if rows.view(world, NUMBERS)[:, 0].tolist() != list(range(world)):
                raise RuntimeError(f"rank {rank} of {world} has wrong numbers: {rows.tolist()}")
    return [statistics.median(times[1:]) for times in samples]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16,32,64", help="comma-separated; the last one is extrapolated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20, help="calls on end per timed sample")
    add_json_option(parser)
    options = parser.parse_args()
    sizes = [int(size) for size in options.ranks.split(",")]
    table = Table({
        "ranks": "{}", "messages in turn": "", "torch us": "{:.0f}", "in rounds us": "{:.0f}", "times faster": "{:.2f}",
        "core us per message": "",
    })  # fmt: skip
    costs, cores = (0.0, 0.0), len(os.sched_getaffinity(0))
    for size in sizes:
        theirs, ours = run_ranks(measured, size, options.rounds, options.calls, timeout=600)[0]
        turns = _messages(size)
        costs = (theirs * cores / size / turns[0], ours * cores / size / turns[1])
        table.add(str(size), _pair(*turns), theirs, ours, theirs / ours, _pair(*costs) if size > cores else "")
    for size in ESTIMATED if sizes[-1] > cores else ():
        turns = _messages(size)
        theirs, ours = turns[0] * costs[0], turns[1] * costs[1]
        table.add(f"{size}, estimate", _pair(*turns), theirs, ours, theirs / ours, "")
    table.save(options.json)


def _messages(size: int) -> tuple[int, int]:
    """Messages of one rank that follow one another: torch's, and in rounds."""
    return size - 1, len(list(rounds(size)))


def _pair(theirs: float, ours: float) -> str:
    return f"{theirs:.0f}, {ours:.0f}"


if __name__ == "__main__":
    main()
