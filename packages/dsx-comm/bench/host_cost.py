"""Microseconds of the host per call, of dsx_comm beside torch.distributed, on messages of a few bytes.

    python packages/dsx-comm/bench/host_cost.py                  # the groups below, one after the other
    python packages/dsx-comm/bench/host_cost.py --groups fake    # one of them

* fake: torch's group that moves nothing, one process. What is left is the cost of the call itself, as it adds to every
  call on a device, where the host only enqueues. Goal: at most 15 us over torch.
* gloo, dsx: two processes that communicate; the time is mostly theirs.

Calls are timed in turn, torch's and ours, `--calls` on end; the table has the lowest time (fake) or the median (gloo,
dsx) of `--rounds` rounds. Nobody observes the calls, and the hang explainer is on, as it is for users.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import dsx_comm
import torch
import torch.distributed as dist
from dsx_testkit.results import Table, add_json_option

NUMEL = 256
GROUPS = ("fake", "gloo", "dsx")
Pair = tuple[Callable[[], Any], Callable[[], Any]]


def pairs(world: int) -> dict[str, Pair]:
    """By name: torch's call and ours."""
    theirs: Any = dist
    gather = getattr(dist, "all_gather_single", None) or theirs.all_gather_into_tensor  # renamed in torch 2.13
    scatter = getattr(dist, "reduce_scatter_single", None) or theirs.reduce_scatter_tensor
    part, whole = torch.zeros(NUMEL), torch.zeros(NUMEL * world)
    return {
        "all_reduce": (lambda: theirs.all_reduce(part), lambda: dsx_comm.all_reduce(part)),
        "all_reduce, async": (
            lambda: theirs.all_reduce(part, async_op=True).wait(),
            lambda: dsx_comm.all_reduce(part, async_op=True).wait(),
        ),
        "all_gather": (lambda: gather(whole, part), lambda: dsx_comm.all_gather_into_tensor(whole, part)),
        "all_gather, async": (
            lambda: gather(whole, part, async_op=True).wait(),
            lambda: dsx_comm.all_gather_into_tensor(whole, part, async_op=True).wait(),
        ),
        "reduce_scatter": (lambda: scatter(part, whole), lambda: dsx_comm.reduce_scatter_tensor(part, whole)),
        "reduce_scatter, async": (
            lambda: scatter(part, whole, async_op=True).wait(),
            lambda: dsx_comm.reduce_scatter_tensor(part, whole, async_op=True).wait(),
        ),
        "broadcast": (lambda: dist.broadcast(part, 0), lambda: dsx_comm.broadcast(part, 0)),
        "barrier": (dist.barrier, dsx_comm.barrier),
    }


def measure(options: argparse.Namespace, world: int, pick: Callable[[list[float]], float]) -> dict[str, list[float]]:
    """{operation: [torch's microseconds, ours]}."""
    dsx_comm.check_first_calls(0)
    found = {}
    for name, pair in pairs(world).items():
        samples: list[list[float]] = [[], []]
        for _ in range(options.rounds + 1):  # the first round warms up
            for times, call in zip(samples, pair):
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(options.calls):
                    call()
                times.append((time.perf_counter() - begin) * 1e6 / options.calls)
        found[name] = [pick(times[1:]) for times in samples]
    return found


def _rank(rank: int, options: argparse.Namespace, group: str, store: str, out: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(group, init_method=f"file://{store}", rank=rank, world_size=2)
    rows = measure(options, 2, statistics.median)
    if rank == 0:
        with open(out, "w") as f:
            json.dump(rows, f)
    dist.barrier()
    dsx_comm.destroy_process_group()


def _of(group: str, options: argparse.Namespace) -> dict[str, list[float]]:
    if group == "fake":
        from torch._C._distributed_c10d import HashStore
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

        dist.init_process_group("fake", store=HashStore(), rank=0, world_size=4)
        rows = measure(options, 4, min)
        dsx_comm.destroy_process_group()
        return rows
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory(prefix="dsx-bench-") as folder:
        out = os.path.join(folder, "rows.json")
        store = os.path.join(folder, "store")
        mp.spawn(_rank, (options, group, store, out), 2)  # pyright: ignore[reportPrivateImportUsage]
        with open(out) as f:
            return json.load(f)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default=",".join(GROUPS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=100, help="calls on end per timed sample")
    add_json_option(parser)
    options = parser.parse_args()
    found = {group: _of(group, options) for group in options.groups.split(",")}
    table = Table({"group": "", "operation": "", "torch us": "{:.1f}", "dsx_comm us": "{:.1f}", "over us": "{:.1f}"})
    for group, rows in found.items():
        for name, (theirs, ours) in rows.items():
            table.add(group, name, theirs, ours, ours - theirs)
    if "fake" in found:
        most = max(ours - theirs for theirs, ours in found["fake"].values())
        table.goal("a call on the fake group at most 15 us over torch", f"{most:.1f} us at most", met=most <= 15)
    table.save(options.json)


if __name__ == "__main__":
    main()
