"""Offload to host and disk: how much memory it takes, how large a model it trains, and what its disk step costs.

    python packages/dsx/bench/offload.py limit [--layers 24] [--width 512] [--folder DIR]
    python packages/dsx/bench/offload.py largest [--limit-mib 400] [--width 256]
    python packages/dsx/bench/offload.py disk-step [--parameters 100000000] [--pairs 5]
    python packages/dsx/bench/offload.py disk-passes [--parameters 100000000] [--pairs 5]
    python packages/dsx/bench/offload.py overlap [--steps 5]

`limit`: a process whose RLIMIT_DATA is its use after import plus a quarter of the states' bytes (18 per parameter)
trains with everything on disk, with its PSS sampled; the same without offload has to fail. `largest`: the most
parameters that DDP trains for two steps under a limit, and whether ZeRO-Infinity trains 10 and 20 times as many under
the same one. `disk-step`: Adam states and masters on disk (24 bytes read and written per fp32 parameter), with
clipping, against the disk's time for the same bytes in the same pieces, reading and writing at once, in alternating
pairs. `disk-passes`: forward and backward with parameters on disk against the larger of the same with parameters in
memory and of the disk's time for the bytes. `overlap`: sleeping layers and a paced link; the part of the transfers that
is not hidden.
The folder must be on a disk, not tmpfs. Run it alone on the machine. With `--json docs/figures/offload.json` each
writes its table to a file of its own, `offload-limit.json` and so on. `--small` takes sizes that show in a minute that
everything runs; its figures mean nothing, because beginnings and ends of short pipelines count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from dsx_testkit.results import Table, add_json_option

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
MIB = 1 << 20
USUAL = {"layers": 24, "width": 512, "limit_mib": 400, "parameters": 100_000_000, "pairs": 5, "steps": 5}
SMALL = {"layers": 8, "width": 384, "limit_mib": 120, "parameters": 8_500_000, "pairs": 1, "steps": 1}
"""What is done where nothing is said. A smaller `limit` is below what the engine itself needs beside the states."""

ROW = 1, 32
"""Rows and their length in `largest`: activations, which grow with the layers, are to be small beside the states."""


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def pss() -> int:
    """Proportional set size of this process, shared memory included."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise KeyError("Pss")


class Sampler(threading.Thread):
    """Samples PSS until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._over = 0, threading.Event()

    def run(self) -> None:
        """See the class."""
        while not self._over.wait(0.01):
            self.peak = max(self.peak, pss())

    def stop(self) -> int:
        """The greatest sample."""
        self._over.set()
        self.join()
        return self.peak


def settings(where: str, folder: str) -> dict[str, Any]:
    """The configuration of one bf16 engine with everything on the device or on disk."""
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if where == "disk":
        place = {"device": "nvme", "nvme_path": folder}
        zero |= {"offload_optimizer": place, "sub_group_size": 1 << 20}
        zero["offload_param"] = place | {"max_in_cpu": 0, "buffer_count": 2, "buffer_size": 8_000_000}
        zero["stage3_prefetch_bucket_size"] = 4_000_000
        zero |= {"stage3_max_live_parameters": 8_000_000, "stage3_max_reuse_distance": 0}  # not kept for the backward
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "steps_per_print": None,
    }


def train_limited(
    where: str, layers: int, width: int, folder: str, limit: int, steps: int, size: int = 2, length: int = 64
) -> dict[str, Any]:
    """In a process of its own: set the limit (0: a quarter of the states), build, train on `size` rows of `length`."""
    import dsx
    import torch
    from dsx_testkit.benches import GPT, batch

    torch.set_num_threads(1)
    with torch.device("meta"):
        numel = sum(p.numel() for p in GPT(width, layers).parameters())
    room = limit or 18 * numel // 4
    if where != "ddp":  # what dsx imports when it is first used belongs to the use after import
        with tempfile.TemporaryDirectory(dir=folder) as inner:
            small, *_ = dsx.initialize(model=GPT(64, 1), config=settings(where, inner))
            small.backward(small(*batch(0, 0, size=2, length=64)))
            small.step()
            small.destroy()
            del small
    at_import, pss_at_import = status("VmData:"), pss()
    resource.setrlimit(resource.RLIMIT_DATA, (at_import + room, resource.RLIM_INFINITY))
    sampler = Sampler()
    sampler.start()
    if where == "ddp":
        model: Any = GPT(width, layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        with dsx.zero.Init(
            remote_device="nvme" if where == "disk" else None,
            dtype=torch.bfloat16,
            config_dict_or_path=settings(where, folder),
        ):
            model = GPT(width, layers)
        model, *_ = dsx.initialize(model=model, config=settings(where, folder))
    losses = []
    for _ in range(steps):
        loss = model(*batch(0, 0, size=size, length=length))
        if where == "ddp":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            model.backward(loss)
            model.step()
        losses.append(loss.item())
    peak = sampler.stop() - pss_at_import
    return {"parameters": numel, "room": room, "peak": peak, "losses": losses}


def child(*arguments: Any) -> dict[str, Any] | None:
    """Run `train_limited` in a fresh process; None when it fails."""
    command = [sys.executable, __file__, "--worker", json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    if arguments[0] != "disk":  # offload sets it by itself; without it glibc keeps what is freed
        environment["MALLOC_MMAP_THRESHOLD_"] = "131072"
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"  {arguments[0]}: failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return None
    return json.loads(lines[-1])


def limit(layers: int, width: int, folder: str) -> Table:
    """Train under a limit of memory with everything on disk, and without offload, which has to fail."""
    sizes = {"room, MiB": "{:.0f}", "PSS above import, MiB": "{:.0f}"}
    table = Table({"state": "", "trains": "", **sizes, "first loss": "{:.3f}", "last loss": "{:.3f}"}, "limit")
    trains: dict[str, bool] = {}
    for where in ("disk", "device"):
        found = child(where, layers, width, folder, 0, 6)
        trains[where] = found is not None
        if found is None:
            table.add(where, "no")
            continue
        losses = found["losses"]
        table.add(where, "yes", found["room"] / MIB, found["peak"] / MIB, losses[0], losses[-1])
    table.goal("trains with room for a quarter of the states, all on disk", met=trains["disk"])
    table.goal("does not without offload", met=not trains["device"])
    return table


def largest(limit_mib: int, width: int, folder: str) -> Table:
    """Find the most parameters that DDP trains under a limit, and try 10 and 20 times as many with ZeRO-Infinity."""
    table = Table({"where": "", "limit, MiB": "", "parameters": "{:,}", "of DDP": "{:.1f}x", "trains": ""}, "largest")
    fits, layers, step, most = 0, 1, 1, 0
    while step:
        found = child("ddp", layers, width, folder, limit_mib * MIB, 2, *ROW)
        if found is not None:
            fits, most = layers, found["parameters"]
            step = step * 2 if layers >= 2 * step else step
            layers += step
        else:
            step = min(step, layers - fits) // 2
            layers = fits + step
    table.add("DDP", limit_mib, most, 1.0, "yes, and one layer more does not")
    if not fits:
        return table
    for times in (10, 20):
        layers = times * fits + times // 2  # the embeddings are there once: enough layers to be above the ratio
        found = child("disk", layers, width, folder, limit_mib * MIB, 2, *ROW)
        if found is None:
            table.add("disk", limit_mib, None, float(times), "no")
            break
        table.add("disk", limit_mib, found["parameters"], found["parameters"] / most, "yes")
    rows = [row for row in table.rows if row["where"] == "disk" and row["trains"] == "yes"]
    table.goal("at least 10x DDP's parameters", met=any(row["of DDP"] >= 10 for row in rows))
    return table


def disk_step(parameters: int, pairs: int, folder: str) -> Table:
    """Compare an Adam step with states and masters on disk with the disk's own time for the same bytes."""
    import dsx_nvme
    import dsx_zero
    import torch
    from torch import nn

    width = 2048
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(max(1, parameters // width**2))))
    store = dsx_nvme.TensorStore(os.path.join(folder, "states"), keep=False, checksum=False)
    config = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": "nvme"}}
    model, optimizer = dsx_zero.shard(
        model.bfloat16(), lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), config=config, store=store
    )
    x = torch.ones(1, width).bfloat16()
    sizes = [group.numel for group in optimizer.step_plan.sub_groups for _ in range(3)]
    raw = dsx_nvme.TensorStore(os.path.join(folder, "raw"), keep=False, checksum=False)
    buffers = [torch.ones(max(sizes)) for _ in range(4)]
    for number, size in enumerate(sizes):
        raw.put(str(number), buffers[0][:size]).wait()

    def step() -> float:
        model(x).square().mean().backward()
        begin = time.perf_counter()
        optimizer.step(max_norm=1.0)
        took = time.perf_counter() - begin
        optimizer.zero_grad()
        return took

    def bytes_alone() -> float:
        begin, writes = time.perf_counter(), [None] * 4
        for number, size in enumerate(sizes):
            place = number % 4
            if writes[place] is not None:
                writes[place].wait()
            raw.get(str(number), buffers[place][:size]).wait()
            writes[place] = raw.put(str(number), buffers[place][:size])
        for write in writes:
            if write is not None:
                write.wait()
        return time.perf_counter() - begin

    step(), bytes_alone()
    rows = [(step(), bytes_alone()) for _ in range(pairs)]
    numel = sum(p.numel() for p in model.parameters())
    columns = {"ms of a step": "{:.0f}", "ms of the bytes alone": "{:.0f}", "ratio": "{:.2f}"}
    table = Table({"parameters": "{:,}", **columns}, "disk-step")
    for took, alone in rows:
        table.add(numel, took * 1e3, alone * 1e3, took / alone)
    median = statistics.median(took / alone for took, alone in rows)
    table.goal("a clipped step at most 1.10 of the bytes alone", f"{median:.2f} in the median", met=median <= 1.10)
    optimizer.release()
    store.close()
    raw.close()
    return table


def disk_passes(parameters: int, pairs: int, folder: str) -> Table:
    """Compare forward and backward with parameters on disk with those in memory, and with the disk's own time."""
    import dsx_nvme
    import dsx_zero
    import torch
    from torch import nn

    width, rows = 2048, 256
    layers = max(2, parameters // width**2)
    nbytes = 2 * layers * width**2
    store = dsx_nvme.TensorStore(os.path.join(folder, "parameters"), keep=False, checksum=False)
    raw = dsx_nvme.TensorStore(os.path.join(folder, "raw"), keep=False, checksum=False)
    buffers = [torch.ones(width * width, dtype=torch.bfloat16) for _ in range(layers)]
    for number, buffer in enumerate(buffers):
        raw.put(str(number), buffer).wait()
    passes: dict[str, Any] = {}
    optimizers = []
    for where in ("device", "disk"):
        model = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers)).bfloat16()
        config: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
        if where == "disk":
            config["offload_param"] = {"device": "nvme", "max_in_cpu": 0}
        stack, optimizer = dsx_zero.shard(_chain(model), None, config=config, store=store)
        optimizers.append(optimizer)
        passes[where] = stack
    x = torch.ones(rows, width, dtype=torch.bfloat16, requires_grad=True)

    def timed(where: str) -> float:
        begin = time.perf_counter()
        passes[where](x).float().square().mean().backward()
        return time.perf_counter() - begin

    def bytes_alone() -> float:
        begin = time.perf_counter()
        for _ in range(2):  # forward and backward
            for ticket in [raw.get(str(number), buffer).ticket for number, buffer in enumerate(buffers)]:
                ticket.wait()
        return time.perf_counter() - begin

    for where in ("device", "disk") * 3:  # the order of gathers is frozen after two
        timed(where)
    rows_found = [(timed("disk"), timed("device"), bytes_alone()) for _ in range(pairs)]
    columns = {"ms from disk": "{:.0f}", "ms of compute": "{:.0f}", "ms of the bytes": "{:.0f}", "ratio": "{:.2f}"}
    table = Table({"parameters": "{:,}", **columns}, "disk-passes")
    for took, compute, alone in rows_found:
        table.add(nbytes // 2, took * 1e3, compute * 1e3, alone * 1e3, took / max(compute, alone))
    median = statistics.median(took / max(compute, alone) for took, compute, alone in rows_found)
    text = "forward and backward at most 1.15 of the larger of compute and bytes"
    table.goal(text, f"{median:.2f} in the median", met=median <= 1.15)
    for optimizer in optimizers:
        optimizer.release()
    store.close()
    raw.close()
    return table


def _chain(layers: Any) -> Any:
    """A module that runs one layer after the other; made late, because `limit` counts what importing torch costs."""
    from torch import nn

    class Chain(nn.Module):
        """One layer after the other."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    return Chain()


def overlap(steps: int) -> Table:
    """Measure the part of the transfers that the computation does not hide."""
    import dsx_zero
    import torch
    from dsx_testkit import PacedLink, SleepingLinear
    from dsx_zero.homes.tiers import DeviceTier, DiskTier, Placement
    from torch import nn

    width, layers, forward_s = 512, 12, 0.02
    nbytes = width * (width + 1) * 4

    class Far:
        """A store behind a link that carries a layer in 0.6 of a layer's forward."""

        def __init__(self) -> None:
            self.tensors: dict[str, Any] = {}
            self.link = PacedLink(nbytes / (0.6 * forward_s))

        def __contains__(self, name: str) -> bool:
            return name in self.tensors

        def put(self, name: str, tensor: Any) -> Any:
            kept = self.tensors.setdefault(name, torch.empty_like(tensor))
            return self.link.copy(kept, tensor)

        def get(self, name: str, out: Any = None) -> Any:
            return self.link.copy(out, self.tensors[name])

    class Stack(nn.Module):
        """Each layer is a unit."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(SleepingLinear(width, forward_s) for _ in range(layers))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    times: dict[str, float] = {}
    for where in ("device", "far"):
        far = Far()
        tier = DeviceTier() if where == "device" else DiskTier(far, ahead_count=3)
        sharded, optimizer = dsx_zero.shard(
            Stack(),
            None,
            config={"stage": 3, "stage3_param_persistence_threshold": 0},
            placement=Placement(parameters=tier),
        )
        with torch.no_grad():
            for number in range(steps + 2):
                if number == 2:
                    begin = time.perf_counter()
                sharded(torch.ones(1, width))
        times[where] = (time.perf_counter() - begin) / steps
        carried = far.link.busy_s / (steps + 2)
        optimizer.release()
    exposed = times["far"] - times["device"]
    columns = {"ms of a forward on the device": "{:.0f}", "behind the link": "{:.0f}"}
    table = Table({**columns, "ms of transfers": "{:.0f}", "exposed": "{:.1%}"}, "overlap")
    table.add(times["device"] * 1e3, times["far"] * 1e3, carried * 1e3, exposed / carried)
    table.goal("at most 5 % exposed", f"{exposed / carried:.1%}", met=exposed / carried <= 0.05)
    return table


def main() -> None:
    """Parse arguments and run one bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", nargs="?", choices=("limit", "largest", "disk-step", "disk-passes", "overlap"))
    add_json_option(parser)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--limit-mib", type=int)
    parser.add_argument("--parameters", type=int)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--small", action="store_true", help="short runs; their figures mean nothing")
    parser.add_argument("--folder")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, value in (SMALL if args.small else USUAL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.worker:
        print(json.dumps(train_limited(*json.loads(args.worker))), flush=True)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.bench == "limit":
            table = limit(args.layers, args.width, folder)
        elif args.bench == "largest":
            table = largest(args.limit_mib, args.width, folder)
        elif args.bench == "disk-step":
            table = disk_step(args.parameters, args.pairs, folder)
        elif args.bench == "disk-passes":
            table = disk_passes(args.parameters, args.pairs, folder)
        elif args.bench == "overlap":
            table = overlap(args.steps)
        else:
            parser.error("which bench?")
    table.save(args.json)


if __name__ == "__main__":
    main()
