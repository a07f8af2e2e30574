"""`dsx bench comm`: times the collectives over sizes on several backends, side by side, with a table and a plot.

    dsx bench comm --ranks 2 --sizes 1K,64K,1M,64M --backends dsx,gloo --plot comm.svg
    torchrun --nproc-per-node 4 -m dsx_comm.benchmark     # on ranks that a launcher starts

All backends run in the same processes, one call of each in turn, so that a disturbance meets all; medians are shown.
`--calls` times several calls on end and divides, as OSU's and NCCL's benchmarks do: a single call of microseconds is
mostly how far apart the ranks begin it. Ratios are against the first backend. `floor` is what the memory allows: the
bytes that the operation must read and write, at the rate of an in-place pass over a tensor of that size, run by all
ranks in the same turn (from 1 MiB on). Bandwidths have the usual definitions (algbw = size / time; busbw = algbw x
2(N-1)/N for all-reduce, (N-1)/N for gathers and scatters). `benchmark_plot.py` draws the picture.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from dsx_core import CommandParser

from ._version import __version__
from .benchmark_plot import has_floor, plot
from .errors import CommArgumentError

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send",
    "barrier",
)
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "int64")}
SYMMETRIC = "dsx-symmetric"  # the dsx backend on tensors in symmetric memory


@dataclass(frozen=True)
class Row:
    """One operation at one size: milliseconds by backend, and of the floor (0: none)."""

    op: str
    nbytes: int
    ranks: int
    times: dict[str, float]
    floor: float


def parse_size(text: str) -> int:
    """`64K` -> 65536. Raises CommArgumentError."""
    factors = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    try:
        value = int(text[:-1]) * factors[text[-1]] if text[-1:] in factors else int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise CommArgumentError(f"sizes: got {text!r}, expected bytes such as 4096, 64K or 1M")
    return value


def floor_bytes(op: str, nbytes: int, ranks: int) -> float:
    """Bytes a rank has to read and write for an operation whose larger side has `nbytes`; 0 where the floor is a
    signal.
    """
    share = nbytes / ranks
    return {
        "all_reduce": 2.0 * nbytes,
        "all_gather": 2.0 * nbytes,
        "reduce_scatter": nbytes + share,
        "all_to_all": 2.0 * nbytes,
        "broadcast": 2.0 * nbytes * (ranks - 1) / ranks,
        "send": 2.0 * nbytes / 2,
    }.get(op, 0.0)


def bus_factor(op: str, ranks: int) -> float:
    """busbw / algbw."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


@dataclass
class Tensors:
    """Tensors that the operations work on: `whole` has N parts, `part` one."""

    whole: torch.Tensor
    other: torch.Tensor
    part: torch.Tensor

    @classmethod
    def make(cls, numel: int, ranks: int, dtype: torch.dtype, empty: Callable[..., torch.Tensor]) -> Tensors:
        """Ordinary or symmetric tensors, by `empty`."""
        sizes = (numel, numel, numel // ranks)
        return cls(*(empty(n, dtype=dtype).fill_(1) for n in sizes))


def call_of(op: str, on: Tensors, group: Any) -> Callable[[], Any]:
    """The operation as a function. MAX, so that repeated reductions do not overflow."""
    rank, ranks = group.rank(), group.size()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    parts = list(on.whole.chunk(ranks))
    most = dist.ReduceOp.MAX

    def send() -> None:
        if rank < 2:
            (dist.send if rank == 0 else dist.recv)(on.whole, 1 - rank, group=group)

    return {
        "all_reduce": lambda: dist.all_reduce(on.whole, most, group=group),
        "all_gather": lambda: gather(on.other, on.part, group=group),
        "reduce_scatter": lambda: scatter(on.part, on.whole, most, group=group),
        "broadcast": lambda: dist.broadcast(on.whole, 0, group=group),
        "reduce": lambda: dist.reduce(on.whole, 0, most, group=group),
        "gather": lambda: dist.gather(on.part, parts if rank == 0 else None, 0, group=group),
        "scatter": lambda: dist.scatter(on.part, parts if rank == 0 else None, 0, group=group),
        "all_to_all": lambda: dist.all_to_all_single(on.other, on.whole, group=group),
        "send": send,
        "barrier": lambda: dist.barrier(group),
    }[op]


def measure(options: argparse.Namespace) -> list[Row]:
    """Run everything on the ranks of the default group; the same rows on every rank."""
    from .symmetric import empty

    names = options.backends.split(",")
    groups = {name: dist.new_group(backend="dsx" if name == SYMMETRIC else name) for name in names}
    dtype = DTYPES[options.dtype]
    ranks = dist.get_world_size()
    rows = []
    for nbytes in map(parse_size, options.sizes.split(",")):
        numel = max(1, nbytes // dtype.itemsize // ranks) * ranks
        plain = Tensors.make(numel, ranks, dtype, torch.empty)
        own = {
            name: Tensors.make(numel, ranks, dtype, lambda *a, g=group, **k: empty(*a, group=g, **k))
            if name == SYMMETRIC
            else plain
            for name, group in groups.items()
        }
        for op in options.ops.split(","):
            if op == "barrier" and rows and any(r.op == op for r in rows):
                continue
            calls = {name: call_of(op, own[name], group) for name, group in groups.items()}
            floor = floor_bytes(op, numel * dtype.itemsize, ranks)
            times = timed_in_turn({**calls, "": lambda p=plain: p.other.mul_(1)}, groups[names[0]], options)
            passed = times.pop("")
            rows.append(Row(op, numel * dtype.itemsize, ranks, times, floor / (2 * numel * dtype.itemsize) * passed))
    return rows


def timed_in_turn(calls: dict[str, Callable[[], Any]], group: Any, options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of each call, the slowest rank's, each called `options.calls` times on end per round."""
    samples = torch.zeros(options.repeats, len(calls), dtype=torch.float64, device="cpu")
    began, rounds = time.perf_counter(), 0
    for round_ in range(-options.warmup, options.repeats):
        for column, call in enumerate(calls.values()):
            dist.barrier(group)
            dist.barrier(group)  # who slept in the first one leaves it late
            start = time.perf_counter()
            for _ in range(options.calls):
                call()
            if round_ >= 0:
                samples[round_, column] = (time.perf_counter() - start) * 1e3 / options.calls
        rounds = max(rounds, round_ + 1)
        slow = torch.tensor(
            [time.perf_counter() - began > options.seconds and rounds >= 5], dtype=torch.uint8, device="cpu"
        )
        dist.all_reduce(slow, dist.ReduceOp.MAX, group=group)  # all ranks stop together
        if slow.item():
            break
    samples = samples[:rounds]
    dist.all_reduce(samples, dist.ReduceOp.MAX, group=group)
    return {name: statistics.median(samples[:, i].tolist()) for i, name in enumerate(calls)}


# - output


def table(rows: Sequence[Row]) -> str:
    """The rows as text. Columns `x peer`: how many times longer that backend takes than the first."""
    names = list(rows[0].times)
    peers = names[1:]
    wide = {name: max(12, len(name) + 5) for name in names}
    head = f"{'operation':<15}{'bytes':>11}" + "".join(f"{name + ' ms':>{wide[name]}}" for name in names)
    head += "".join(f"{'x ' + name:>{wide[name]}}" for name in peers)
    lines = [head + f"{'algbw GB/s':>12}{'busbw GB/s':>12}{'of floor':>10}"]
    for row in rows:
        first = row.times[names[0]]
        line = f"{row.op:<15}{row.nbytes:>11}" + "".join(f"{row.times[name]:>{wide[name]}.4f}" for name in names)
        line += "".join(f"{row.times[name] / first:>{wide[name]}.1f}" for name in peers)
        rate = row.nbytes / first / 1e6
        line += f"{rate:>12.2f}{rate * bus_factor(row.op, row.ranks):>12.2f}" if row.op != "barrier" else " " * 24
        line += f"{row.floor / first:>10.2f}" if has_floor(row) else ""
        lines.append(line.rstrip())
    return "\n".join(lines)


# - running it


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        version=f"dsx-comm {__version__}",
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (ignored under a launcher)")
    parser.add_argument("--sizes", default="1K,64K,1M,16M", help="bytes of the larger side, comma-separated")
    parser.add_argument("--ops", default=",".join(OPERATIONS), help="operations, comma-separated")
    parser.add_argument("--backends", default="dsx,gloo", help=f"comma-separated; also nccl, mpi, {SYMMETRIC}")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--calls", type=int, default=1, help="calls on end per timed sample")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="stop repeating an operation after this (5 rounds at least)"
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the rows to this file (alone: print them)"
    )
    parser.add_argument("--plot", help="write a picture (SVG) to this file")
    return parser


def _check(options: argparse.Namespace) -> None:
    for op in options.ops.split(","):
        if op not in OPERATIONS:
            raise CommArgumentError(f"--ops: got {op!r}, expected some of {', '.join(OPERATIONS)}")
    for size in options.sizes.split(","):
        parse_size(size)
    for name, least in (("ranks", 2), ("repeats", 1), ("calls", 1), ("warmup", 0)):
        if getattr(options, name) < least:
            raise CommArgumentError(f"--{name}: got {getattr(options, name)}, expected at least {least}")


def _worker(rank: int, options: argparse.Namespace, store: str, out: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    rows = measure(options)
    if rank == 0:
        with open(out, "w") as f:
            json.dump([asdict(r) for r in rows], f)
    dist.barrier()
    dist.destroy_process_group()


def _started_here(options: argparse.Namespace) -> list[Row]:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory(prefix="dsx-bench-") as folder:
        out = os.path.join(folder, "rows.json")
        arguments = (options, os.path.join(folder, "store"), out)
        mp.spawn(_worker, arguments, options.ranks)  # pyright: ignore[reportPrivateImportUsage]
        with open(out) as f:
            return [Row(**r) for r in json.load(f)]


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx bench comm") -> int:
    """Entry point; returns the exit code."""
    options = _parser(prog).parse_args(argv)
    try:
        _check(options)
    except CommArgumentError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    if "RANK" in os.environ:
        from .init import init_distributed

        init_distributed()
        rows = measure(options)
        if dist.get_rank() != 0:
            return 0
    else:
        rows = _started_here(options)
    calls = "one call" if options.calls == 1 else f"{options.calls} calls"
    how = f"{options.dtype}, medians of up to {options.repeats} samples of {calls}"
    as_json = json.dumps([asdict(r) for r in rows], indent=1) + "\n"
    sys.stdout.write(as_json if options.json == "-" else f"{rows[0].ranks} ranks, {how}\n{table(rows)}\n")
    if options.json not in (None, "-"):
        with open(options.json, "w") as f:
            f.write(as_json)
    if options.plot:
        with open(options.plot, "w", encoding="utf-8") as f:
            f.write(plot(rows, how))
    return 0


if __name__ == "__main__":
    sys.exit(main())
