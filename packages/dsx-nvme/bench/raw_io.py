"""Tensors to and from one file beside the peers: GB/s, CPU seconds per GB, the ratio to fio's best of the same round.

    python packages/dsx-nvme/bench/raw_io.py [--folder DIR] [--gib 1.0] [--rounds 5] [--json FILE]

All contenders use the same file, O_DIRECT, blocks of 1 MiB, 32 in flight, one submitting thread. Every round runs each
of them once, in a new order; ratios are taken within a round, and their medians over the rounds are printed, because
the disk drifts. Peers: fio (io_uring, libaio) and DeepSpeed's aio_handle, pinned and unpinned. Goals: fio 0.95,
DeepSpeed 1.0 (1.2 unpinned), half of DeepSpeed's CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import dsx_nvme
import torch
from dsx_testkit.results import Table, add_json_option

BLOCK, DEPTH = 1 << 20, 32


@dataclass
class Measured:
    """One run: GB/s, and CPU seconds per GB where they can be had."""

    speed: float
    cpu: float | None = None


Run = Callable[[str], Measured]  # "read" or "write"


def timed(move: Callable[[], object], nbytes: int) -> Measured:
    """Wall and CPU time of a call, all threads of this process counted."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    move()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(nbytes / wall / 1e9, cpu / (nbytes / 1e9))


def fio(engine: str, path: str, nbytes: int) -> Run:
    """fio with the same settings."""

    def run(op: str) -> Measured:
        command = [
            "fio", "--name=x", f"--filename={path}", f"--rw={op}", f"--bs={BLOCK}",
            f"--iodepth={DEPTH}", f"--ioengine={engine}",
            "--direct=1", f"--size={nbytes}", "--overwrite=1", "--output-format=json", "--end_fsync=0",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        wall = job[op]["runtime"] / 1e3
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * wall / (nbytes / 1e9)
        return Measured(nbytes / wall / 1e9, cpu)

    return run


def ours(engine: str, path: str, tensor: torch.Tensor, *, locked: bool) -> Run:
    """An aio_handle of ours; `locked`: in a tensor of new_cpu_locked_tensor."""
    handle = dsx_nvme.aio_handle(BLOCK, DEPTH, False, True, 1, engine=engine)
    if locked:
        own = handle.new_cpu_locked_tensor(tensor.numel(), tensor)
        own.copy_(tensor)
        tensor = own

    def run(op: str) -> Measured:
        call = handle.sync_pwrite if op == "write" else handle.sync_pread
        return timed(lambda: call(tensor, path), tensor.numel())

    return run


def deepspeed(path: str, tensor: torch.Tensor, *, locked: bool) -> Run | None:
    """DeepSpeed's handle with the same settings, when it can be imported and its native part be built."""
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        handle = AsyncIOBuilder().load(verbose=False).aio_handle(BLOCK, DEPTH, False, True, 1)
    except Exception as error:  # noqa: BLE001  whatever keeps a peer from running is printed, not ours to fix
        print(f"  (no DeepSpeed peer: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
        return None
    if locked:
        own = handle.new_cpu_locked_tensor(tensor.numel(), tensor)
        own.copy_(tensor)
        tensor = own

    def run(op: str) -> Measured:
        call = handle.sync_pwrite if op == "write" else handle.sync_pread
        return timed(lambda: call(tensor, path), tensor.numel())

    return run


def contenders(path: str, nbytes: int) -> dict[str, Run]:
    """Everything that can run here."""
    tensor = torch.randint(0, 1 << 62, (nbytes // 8,), dtype=torch.int64).view(torch.uint8)
    found: dict[str, Run] = {}
    if shutil.which("fio"):
        found |= {f"fio {e}": fio(e, path, nbytes) for e in ("io_uring", "libaio")}
    else:
        print("  (no fio: install it from your system's packages)")
    for locked in (True, False):
        kind = "pinned" if locked else "unpinned"
        found[f"dsx {kind}"] = ours("auto", path, tensor, locked=locked)
        peer = deepspeed(path, tensor, locked=locked)
        if peer is not None:
            found[f"deepspeed {kind}"] = peer
    return found


def measure(found: dict[str, Run], rounds: int) -> dict[str, dict[str, list[Measured]]]:
    """op -> contender -> one measurement per round. The first round warms up and is left out."""
    results: dict[str, dict[str, list[Measured]]] = {op: {name: [] for name in found} for op in ("write", "read")}
    for number in range(rounds + 1):
        for op in ("write", "read"):
            for name in random.sample(list(found), len(found)):
                measured = found[name](op)
                if number:
                    results[op][name].append(measured)
    return results


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of what is there; None if nothing is."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def report(results: dict[str, dict[str, list[Measured]]]) -> Table:
    """The table of the medians, with the goals."""
    ratio = "{:.2f}"
    table = Table({"operation": "", "contender": "", "GB/s": ratio, "CPU s/GB": "{:.3f}", "/ fio best": ratio,
                   "/ deepspeed": ratio, "CPU / deepspeed": ratio})  # fmt: skip
    for op, by_name in results.items():
        count = len(next(iter(by_name.values())))
        best = [max((m[i].speed for n, m in by_name.items() if n.startswith("fio")), default=0.0) for i in range(count)]
        for name, runs in by_name.items():
            peers = by_name.get(name.replace("dsx", "deepspeed"), []) if name.startswith("dsx") else []
            against_fio = median_of(r.speed / b for r, b in zip(runs, best) if b)
            against_peer = median_of(r.speed / p.speed for r, p in zip(runs, peers))
            effort = median_of((r.cpu or 0) / (p.cpu or 1) for r, p in zip(runs, peers))
            speed, cpu = median_of(r.speed for r in runs), median_of(r.cpu for r in runs)
            table.add(op, name, speed, cpu, against_fio, against_peer, effort)
            if name.startswith("dsx"):
                least = 1.0 if name.endswith(" pinned") else 1.2
                judge(table, f"{op}, {name}: at least 0.95 of fio's best", against_fio, 0.95)
                judge(table, f"{op}, {name}: at least {least}x DeepSpeed", against_peer, least)
                judge(table, f"{op}, {name}: at most half of DeepSpeed's CPU", effort, 0.5, most=True)
    return table


def judge(table: Table, text: str, found: float | None, bound: float, *, most: bool = False) -> None:
    """A goal; nothing where the peer did not run."""
    if found is not None:
        table.goal(text, f"{found:.2f}", met=found <= bound if most else found >= bound)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None, help="where the file goes (default: a temporary folder)")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    args = parser.parse_args()
    nbytes = int(args.gib * 2**30) // BLOCK * BLOCK
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="dsx-nvme-bench-") as folder:
        path = os.path.join(folder, "file")
        print(dsx_nvme.explain(folder))
        found = contenders(path, nbytes)
        report(measure(found, args.rounds)).save(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
