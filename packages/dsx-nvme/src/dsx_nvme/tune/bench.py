"""`dsx-nvme bench`: a benchmark of tensor I/O, with GB/s, latency percentiles, JSON and a picture."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

import torch
from dsx_core import CommandParser
from dsx_core.device import Device

from ..errors import NvmeError, OptionError
from ..fast_writer import FastFileWriter
from ..gds import gds_handle
from ..handle import aio_handle, aio_read, aio_write
from ..memory import empty
from .show import Progress, parse_count, parse_size, svg_bars

PROGRAM = "dsx-nvme bench"
ENGINES = ("aio_handle", "aio_basic", "torch_io", "torch_fastio")
SAMPLES = 200  # single blocks for the latency
PERCENTILES = (50, 90, 99, 100)


def parser(prog: str = PROGRAM) -> argparse.ArgumentParser:
    """The options."""
    p = CommandParser(prog=prog, description=__doc__)
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", help="where the files go")
    where.add_argument(
        "--folder_to_device_mapping", nargs="+", metavar="DIR:DEV", help="one process per pair; DEV is a GPU number"
    )
    p.add_argument("--io_size", type=parse_size, required=True, help="bytes per process, as 400M or 1G")
    p.add_argument("--fast_io_size", type=parse_size, default=parse_size("64M"), help="buffers of torch_fastio (64M)")
    p.add_argument("--read", action="store_true", help="read (default: write)")
    p.add_argument("--multi_process", type=parse_count, default=1, help="processes")
    p.add_argument("--block_size", type=parse_size, default=parse_size("1M"))
    p.add_argument("--queue_depth", type=parse_count, default=32)
    p.add_argument("--single_submit", action="store_true")
    p.add_argument("--sequential_requests", action="store_true", help="overlap_events off")
    p.add_argument("--validate", action="store_true", help="compare with an ordinary read of the file")
    p.add_argument("--engine", choices=ENGINES, default="aio_handle")
    p.add_argument("--loops", type=parse_count, default=3)
    p.add_argument("--io_parallel", type=parse_count, default=1, help="threads of a handle")
    p.add_argument("--gpu", action="store_true", help="tensors in GPU memory")
    p.add_argument("--use_gds", action="store_true", help="GPUDirect Storage")
    p.add_argument("--slow_bounce_buffer", action="store_true", help="memory that is not page-aligned")
    p.add_argument(
        "--torch_legacy_save", action="store_true", help="torch_io, torch_fastio: the format before zip files"
    )
    p.add_argument("--use_accelerator_pin_memory", action="store_true", help="torch's pinned memory instead of ours")
    p.add_argument("--warmup_loops", type=int, choices=range(1000), metavar="N", default=1)
    p.add_argument("--include_warmup_time", action="store_true")
    p.add_argument("--different_file_each_iteration", action="store_true")
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the result there (alone: print it)")
    p.add_argument("--picture", help="write an SVG to this file")
    return p


def main(argv: Sequence[str] | None = None, *, prog: str = PROGRAM) -> int:
    """Run; returns an exit code. `prog`: the name that the program was called by."""
    args = parser(prog).parse_args(argv)
    try:
        result = _run(args)
    except (OptionError, NvmeError, OSError, ValueError) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 1
    sys.stdout.write(json.dumps(result) + "\n" if args.json == "-" else _text(result))
    if args.json not in (None, "-"):
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    if args.picture:
        loops = [(f"loop {i}", [(result["op"], s)]) for i, s in enumerate(result["task_speeds"])]
        with open(args.picture, "w", encoding="utf-8") as file:
            file.write(svg_bars(f"dsx-nvme bench: {result['engine']} {result['op']}", loops, "GB/s"))
    return 0


def _run(args: argparse.Namespace) -> dict[str, Any]:
    places: list[tuple[str, int | None]] = [(args.folder, None)] * args.multi_process
    if args.folder_to_device_mapping:
        pairs = [p.rsplit(":", 1) for p in args.folder_to_device_mapping]
        if any(len(p) != 2 or not p[1].isdigit() for p in pairs):
            raise OptionError(f"--folder_to_device_mapping {args.folder_to_device_mapping}: expected DIR:NUMBER")
        places = [(folder, int(device)) for folder, device in pairs]
    op = "read" if args.read else "write"
    started = time.perf_counter()
    if len(places) == 1:
        bar = Progress(f"{args.engine} {op}")
        parts = [_one(args, places[0][0], places[0][1], lambda: None, bar.update)]
        bar.finish()
    else:
        parts = _processes(args, places)
    wall = time.perf_counter() - started
    per_loop = [max(p["seconds"][i] for p in parts) for i in range(args.loops)]
    total = args.io_size * len(places)
    timed = sum(per_loop) + (max(p["warmup"] for p in parts) if args.include_warmup_time else 0.0)
    loops = args.loops + (args.warmup_loops if args.include_warmup_time else 0)
    return {
        "op": op, "engine": args.engine, "processes": len(places), "io_size": args.io_size, "loops": args.loops,
        "mode": parts[0]["mode"], "task_latency_s": timed / max(1, loops),
        "task_speed_gbps": total * loops / timed / 1e9,
        "task_speeds": [total / s / 1e9 for s in per_loop], "e2e_latency_s": wall,
        "e2e_speed_gbps": total * (args.loops + args.warmup_loops) / wall / 1e9,
        "block_latency_us": parts[0]["block_latency_us"],
    }  # fmt: skip


def _text(r: dict[str, Any]) -> str:
    word = r["op"].capitalize()
    lines = [
        f"Task {word} Latency = {r['task_latency_s']:.4f} sec",
        f"Task {word} Speed = {r['task_speed_gbps']:.3f} GB/sec",
        f"E2E {word} Latency = {r['e2e_latency_s']:.4f} sec",
        f"E2E {word} Speed = {r['e2e_speed_gbps']:.3f} GB/sec",
    ]
    if r["block_latency_us"]:
        shown = ", ".join(f"p{p} {v:.0f}" for p, v in r["block_latency_us"].items())
        lines.append(f"one block at depth 1, microseconds: {shown} ({r['mode']})")
    return "\n".join(lines) + "\n"


def _processes(args: argparse.Namespace, places: list[tuple[str, int | None]]) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(places))
    left: dict[Any, Any] = {}  # the pipes that children's answers come from
    for folder, device in places:
        answer, write = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(args, folder, device, barrier, write))
        child.start()
        write.close()  # then only the child has this end, and reading fails when the child dies
        left[answer] = child
    results: list[Any] = []
    while left:
        ready: list[Any] = connection.wait(list(left))
        for answer in ready:
            child = left.pop(answer)
            try:
                results.append(answer.recv())
                child.join()
            except EOFError:
                child.join()
                results.append(f"process {child.pid} ended without an answer, exit code {child.exitcode}")
                barrier.abort()  # so that the other processes do not wait for it
    for result in results:
        if isinstance(result, str):
            raise NvmeError(result)
    return results


def _child(args: argparse.Namespace, folder: str, device: int | None, barrier: Any, answer: Any) -> None:
    try:
        answer.send(_one(args, folder, device, lambda: barrier.wait(120), lambda part, note: None))
    except Exception as error:  # noqa: BLE001  reported by the parent
        answer.send(f"{type(error).__name__}: {error}")
        barrier.abort()


def _one(
    args: argparse.Namespace,
    folder: str,
    device: int | None,
    together: Callable[[], Any],
    tell: Callable[[float, str], None],
) -> dict[str, Any]:
    """Run all loops of one process; returns seconds of each, seconds of the warm-up, latencies of single blocks."""
    os.makedirs(folder, exist_ok=True)
    stem = os.path.join(folder, f"dsx-nvme-bench-{uuid.uuid4().hex}")
    kind = gds_handle if args.use_gds else aio_handle
    used: list[str] = []
    with kind(
        args.block_size, args.queue_depth, args.single_submit, not args.sequential_requests, args.io_parallel
    ) as handle:
        tensor = _tensor(args, handle, device)
        move = _mover(args, handle)
        try:
            seconds, warmup = [], 0.0
            for loop in range(-args.warmup_loops, args.loops):
                path = f"{stem}-{loop}" if args.different_file_each_iteration else stem
                if path not in used:
                    used.append(path)
                    if args.read:
                        move("write", tensor, path)
                together()
                begun = time.perf_counter()
                move("read" if args.read else "write", tensor, path)
                Device.of(tensor).synchronize()
                took = time.perf_counter() - begun
                warmup += took if loop < 0 else 0.0
                seconds += [took] if loop >= 0 else []
                tell(
                    (loop + args.warmup_loops + 1) / (args.loops + args.warmup_loops),
                    f"{args.io_size / took / 1e9:.2f} GB/s",
                )
            latency = _latency(args, handle, used[-1]) if args.engine == "aio_handle" else {}
        finally:
            for path in used:
                if os.path.exists(path):
                    os.unlink(path)
    return {"seconds": seconds, "warmup": warmup, "block_latency_us": latency, "mode": getattr(handle, "mode", "host")}


def _tensor(args: argparse.Namespace, handle: aio_handle, device: int | None) -> torch.Tensor:
    if args.gpu or args.use_gds or device is not None:
        place = torch.device("cuda", device or 0)
        return torch.randint(0, 256, (args.io_size,), dtype=torch.uint8, device=place)
    if args.slow_bounce_buffer:
        tensor = torch.empty(args.io_size + 1, dtype=torch.uint8, device="cpu")[1:]
    elif args.use_accelerator_pin_memory:
        tensor = torch.empty(args.io_size, dtype=torch.uint8, device="cpu").pin_memory()
    else:
        tensor = handle.new_cpu_locked_tensor(args.io_size, torch.empty(0, dtype=torch.uint8, device="cpu"))
    return tensor.random_(0, 256)


def _mover(args: argparse.Namespace, handle: aio_handle) -> Callable[[str, torch.Tensor, str], Any]:
    """A function that transfers a tensor with the chosen engine."""
    overlap, legacy = not args.sequential_requests, not args.torch_legacy_save

    def by_handle(op: str, tensor: torch.Tensor, path: str) -> None:
        (handle.read if op == "read" else handle.write)(tensor, path, args.validate)

    def basic(op: str, tensor: torch.Tensor, path: str) -> None:
        call = aio_read if op == "read" else aio_write
        call(tensor, path, args.block_size, args.queue_depth, args.single_submit, overlap, args.validate)

    def by_torch(op: str, tensor: torch.Tensor, path: str) -> None:
        if op == "write":
            torch.save(tensor, path, _use_new_zipfile_serialization=legacy)
        else:
            tensor.copy_(torch.load(path, weights_only=True))

    def fast(op: str, tensor: torch.Tensor, path: str) -> None:
        if op == "read":
            return by_torch(op, tensor, path)
        with FastFileWriter(path, buffer_bytes=args.fast_io_size, engine=handle.engine) as file:
            torch.save(tensor, file, _use_new_zipfile_serialization=legacy)  # type: ignore[arg-type]

    return {"aio_handle": by_handle, "aio_basic": basic, "torch_io": by_torch, "torch_fastio": fast}[args.engine]


def _latency(args: argparse.Namespace, handle: aio_handle, path: str) -> dict[int, float]:
    """Microseconds of single blocks at random places, one after the other."""
    blocks = args.io_size // args.block_size
    if blocks == 0:
        return {}
    block = empty(args.block_size, dtype=torch.uint8)
    taken = []
    for _ in range(min(SAMPLES, blocks * 4)):
        offset = random.randrange(blocks) * args.block_size
        begun = time.perf_counter()
        (handle.sync_pread if args.read else handle.sync_pwrite)(block, path, offset)
        taken.append((time.perf_counter() - begun) * 1e6)
    taken.sort()
    return {p: taken[min(len(taken) - 1, len(taken) * p // 100)] for p in PERCENTILES}
