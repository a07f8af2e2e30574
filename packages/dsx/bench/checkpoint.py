"""Saving and loading a GPT with Adam: dsx, torch.save, torch.distributed.checkpoint (also its async), DeepSpeed.

    python packages/dsx/bench/checkpoint.py --folder /data/tmp            # 85 M parameters, about 1 GB
    python packages/dsx/bench/checkpoint.py --small                       # to see that it works
    python packages/dsx/bench/checkpoint.py --json docs/figures/checkpoint.json

One process; every contender saves the same tensors and has them on the disk (fsync) when its time ends. Contenders take
turns in each round, and the table has medians. The rate of the disk is that of one file of the same size, written in
pieces of 16 MiB and fsynced, in the same round. DeepSpeed takes part if it can be imported.

What is measured:
    save       until everything is on disk
    stall      until the call of an asynchronous save returns
    step       step time at an asynchronous save every 10 steps, over the step time without saves
    load       at the layout of the save, and re-sharded (saved by two ranks at stage 3, loaded by one at stage 0)
    growth     the most resident memory of each of two ranks during a load at stage 3, over what it had before and the
               bytes of its shard
    inspect    the index of a made-up checkpoint of 1 TB, in a process of its own

Below the table stand the goals, each with what was found. A goal that compares two contenders uses medians of the same
rounds.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dsx_testkit import benches
from dsx_testkit.benches import GPT, batch
from dsx_testkit.results import Table, add_json_option

Contender = Callable[[Path], float]
TITLES = {
    "disk": "the disk, one file of the same size",
    "dsx": "dsx",
    "torch.save": "torch.save",
    "dcp": "torch DCP",
    "deepspeed": "DeepSpeed",
    "dsx stall": "dsx, asynchronous: until the call returns",
    "dsx async": "dsx, asynchronous: until all is on disk",
    "dcp stall": "torch DCP, asynchronous: until the call returns",
    "dcp async": "torch DCP, asynchronous: until all is on disk",
}


def engine_of(width: int, layers: int, stage: int = 0) -> Any:
    """An engine that has made one step, so that there are optimizer states."""
    import dsx

    torch.manual_seed(0)
    config = {
        "train_batch_size": 4 * (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": None,
    }
    engine = dsx.initialize(model=GPT(width, layers, width // 64), config=config)[0]
    step(engine, 0)
    return engine


def step(engine: Any, number: int) -> None:
    """One update."""
    engine.backward(engine(*batch(number, engine.global_rank)))
    engine.step()


def sync(folder: Path) -> None:
    """Everything below a folder is on the disk."""
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def timed(call: Callable[[], Any]) -> float:
    """Seconds."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# - Contenders


def plain_state(engine: Any) -> dict[str, Any]:
    """Weights and states of the engine as a program of plain torch has them."""
    parts = list(engine.optimizer.slices(held=True))
    return {
        "model": {p.name: p.param.view(p.shape) for p in parts},
        "optimizer": {p.name: {k: v for k, v in p.states.items()} for p in parts if p.states},
    }


def save_dsx(engine: Any) -> Contender:
    return lambda folder: timed(lambda: engine.save_checkpoint(folder))


def dsx_async(engine: Any, *, stall: bool) -> Contender:
    """Until the call returns, or until everything is on disk."""

    def run(folder: Path) -> float:
        began = time.perf_counter()
        engine.save_checkpoint(folder, asynchronous=True)
        stalled = time.perf_counter() - began
        engine.wait_for_checkpoints()
        return stalled if stall else time.perf_counter() - began

    return run


def save_torch(engine: Any) -> Contender:
    def run(folder: Path) -> float:
        def save() -> None:
            folder.mkdir()
            torch.save(plain_state(engine), folder / "state.pt")
            sync(folder)

        return timed(save)

    return run


def save_dcp(engine: Any) -> Contender:
    from torch.distributed import checkpoint

    def run(folder: Path) -> float:
        writer = checkpoint.FileSystemWriter(str(folder), sync_files=True)
        return timed(lambda: (checkpoint.save(plain_state(engine), storage_writer=writer, no_dist=True), sync(folder)))

    return run


def dcp_async(engine: Any, *, stall: bool) -> Contender:
    """torch's own asynchronous save: until the call returns, or until everything is on disk."""
    from torch.distributed import checkpoint

    def run(folder: Path) -> float:
        began = time.perf_counter()
        writer = checkpoint.FileSystemWriter(str(folder), sync_files=True)
        future = checkpoint.async_save(plain_state(engine), storage_writer=writer, no_dist=True)
        stalled = time.perf_counter() - began
        future.result()
        sync(folder)
        return stalled if stall else time.perf_counter() - began

    return run


def save_deepspeed(width: int, layers: int) -> Contender | None:
    try:
        deepspeed = benches.deepspeed()
    except ImportError:
        return None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    model = GPT(width, layers, width // 64)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.backward(engine(*batch(0, 0)))
    engine.step()

    def run(folder: Path) -> float:
        return timed(lambda: (engine.save_checkpoint(str(folder)), sync(folder)))

    return run


def disk(nbytes: int) -> Contender:
    piece = os.urandom(16 << 20)

    def run(folder: Path) -> float:
        def write() -> None:
            folder.mkdir()
            fd = os.open(folder / "file", os.O_CREAT | os.O_WRONLY)
            for begin in range(0, nbytes, len(piece)):
                os.write(fd, piece[: nbytes - begin])
            os.fsync(fd)
            os.close(fd)

        return timed(write)

    return run


# - What is measured


def rounds(contenders: dict[str, Contender], folder: Path, count: int) -> dict[str, float]:
    """Median seconds; contenders take turns, and the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(count + 1):
        for name, run in contenders.items():
            target = folder / f"{name.replace(' ', '-')}-{number}"
            taken = run(target)
            if number:
                seconds[name].append(taken)
            shutil.rmtree(target)
    return {name: statistics.median(values) for name, values in seconds.items()}


def step_ratio(engine: Any, folder: Path, steps: int) -> float:
    """Time of steps with an asynchronous save every 10, over the time without."""

    def run(saves: bool) -> float:
        def loop() -> None:
            for number in range(steps):
                step(engine, number)
                if saves and number % 10 == 0:
                    engine.save_checkpoint(folder / "steps", tag="a", asynchronous=True)

        seconds = timed(loop)
        engine.wait_for_checkpoints()
        return seconds

    run(True)
    pairs = [(run(True), run(False)) for _ in range(2)]
    return min(with_saves for with_saves, _ in pairs) / min(without for _, without in pairs)


def save_sharded(rank: int, world: int, folder: str, width: int, layers: int) -> None:
    """For the re-sharded load: two ranks, stage 3."""
    engine_of(width, layers, stage=3).save_checkpoint(folder, tag="sharded")


def loads(engine: Any, folder: Path, width: int, layers: int) -> dict[str, float]:
    """Seconds of a plain load, and of one that re-shards."""
    from dsx_testkit import run_ranks

    engine.save_checkpoint(folder / "loads", tag="plain")
    run_ranks(save_sharded, 2, str(folder / "loads"), width, layers, timeout=600)
    found: dict[str, list[float]] = {"plain": [], "sharded": []}
    for _ in range(3):
        for tag, seconds in found.items():
            load = functools.partial(engine.load_checkpoint, folder / "loads", tag=tag)
            seconds.append(timed(load))
    return {tag: statistics.median(seconds) for tag, seconds in found.items()}


def shard_bytes(engine: Any) -> int:
    """Bytes of parameters, masters and optimizer states that this rank holds."""
    total = 0
    for part in engine.optimizer.slices(held=True):
        values = [part.param, part.master, *part.states.values()]
        total += sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
    return total


def resident(peak: bool) -> int:
    """Bytes of resident memory of this process: the most since `forget_peak`, or now."""
    key = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def forget_peak() -> None:
    """From now on the peak is counted again."""
    Path("/proc/self/clear_refs").write_text("5")


def load_and_measure(rank: int, world: int, folder: str, width: int, layers: int) -> tuple[int, int]:
    """Growth of resident memory during a load, and the bytes of this rank's shard."""
    engine = engine_of(width, layers, stage=3)
    before = resident(peak=False)
    forget_peak()
    engine.load_checkpoint(folder, tag="sharded")
    return resident(peak=True) - before, shard_bytes(engine)


def growth(folder: Path, width: int, layers: int) -> dict[str, int]:
    """Of the rank that needs more beyond its shard; after `loads`."""
    from dsx_testkit import run_ranks

    found = run_ranks(load_and_measure, 2, str(folder / "loads"), width, layers, timeout=600)
    grown, shard = max(found, key=lambda item: item[0] - item[1])
    return {"grown": grown, "shard": shard}


def inspect_large(folder: Path) -> float:
    """Seconds of a process that inspects the index of 1 TB."""
    from dsx_checkpoint.format import CHUNK_BYTES, VERSION, seal

    count, size = 2000, 500_000_000
    hashes = "0" * 8 * -(-size // CHUNK_BYTES)
    names = [f"w{n}" for n in range(count)]
    tensors = {
        n: {"dtype": "BF16", "shape": [size // 2], "file": f"model-{n}.safetensors", "offset": 8, "hashes": hashes}
        for n in names
    }
    files = {f"model-{n}.safetensors": {"bytes": size + 8, "header_bytes": 8, "header_hash": "0" * 8} for n in names}
    data = {
        "format": "dsx-checkpoint", "version": VERSION, "writer": "", "latest": True, "hash": "crc32",
        "chunk_bytes": CHUNK_BYTES, "files": files, "model": tensors, "optimizer": {}, "client": {},
        "aliases": {n: [] for n in names}, "excluded": [], "scalars": {}, "state": {}, "ranks": [],
    }  # fmt: skip
    (folder / "large" / "a").mkdir(parents=True)
    (folder / "large" / "a" / "dsx.json").write_text(seal(data))
    command = [sys.executable, "-m", "dsx", "checkpoint", "inspect", str(folder / "large" / "a")]
    return min(timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)) for _ in range(3))


def add_goals(table: Table, figures: dict[str, Any]) -> None:
    """What the design asks for, with what was found."""
    seconds, load, memory = figures["seconds"], figures["load"], figures["growth"]
    others = {name: seconds[name] for name in ("torch.save", "dcp", "dcp async", "deepspeed") if name in seconds}
    rate, best = seconds["disk"] / seconds["dsx"], min(others, key=lambda name: others[name])
    times = others[best] / seconds["dsx"]
    found = f"{rate:.2f} of the rate, {times:.2f}x {TITLES[best]}"
    table.goal("a save at 0.80 of the disk's rate, or twice as fast as the best other", found,
               met=rate >= 0.8 or times >= 2)  # fmt: skip
    stall = seconds["dsx stall"] / seconds["torch.save"]
    table.goal("an asynchronous save holds training for 5 % of torch.save", f"{stall:.1%}", met=stall <= 0.05)
    ratio = figures["step ratio"]
    table.goal("a step with a save every 10 steps at most 1.05 of one without", f"{ratio:.3f}", met=ratio <= 1.05)
    reshard = load["sharded"] / load["plain"]
    table.goal("a re-sharded load at most 1.2 of a plain one", f"{reshard:.2f}", met=reshard <= 1.2)
    over = (memory["grown"] - memory["shard"]) / 2**20
    text = "resident memory during a load, beyond the shard, at most 64 MiB"
    table.goal(text, f"{over:.0f} MiB" if over > 0 else "none beyond it", met=over <= 64)
    inspect = figures["inspect 1 TB"]
    table.goal("`inspect` of the index of 1 TB within 1 s", f"{inspect:.2f} s", met=inspect <= 1)


def main() -> None:
    """Print a table and the goals; with --json they are written too."""
    parser = argparse.ArgumentParser(description="saving and loading, against torch and DeepSpeed")
    parser.add_argument("--folder", help="on the disk to be measured; default: the temporary folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a tiny model, one round")
    add_json_option(parser)
    given = parser.parse_args()
    width, layers = (64, 1) if given.small else (768, 12)
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder = Path(made)
        engine = engine_of(width, layers)
        nbytes = 12 * sum(p.numel() for p in engine.module.parameters())
        contenders: dict[str, Contender | None] = {
            "disk": disk(nbytes), "dsx": save_dsx(engine), "torch.save": save_torch(engine), "dcp": save_dcp(engine),
            "deepspeed": save_deepspeed(width, layers), "dsx stall": dsx_async(engine, stall=True),
            "dsx async": dsx_async(engine, stall=False), "dcp stall": dcp_async(engine, stall=True),
            "dcp async": dcp_async(engine, stall=False),
        }  # fmt: skip
        found = rounds(
            {n: c for n, c in contenders.items() if c is not None}, folder, 1 if given.small else given.rounds
        )
        figures: dict[str, Any] = {"seconds": found}
        figures["step ratio"] = step_ratio(engine, folder, 10 if given.small else 40)
        figures["load"] = loads(engine, folder, width, layers)
        figures["growth"] = growth(folder, width, layers)
        figures["inspect 1 TB"] = inspect_large(folder)
    table = Table({"what": "", "seconds": "{:.3f}", f"GB/s, of {nbytes / 1e9:.2f} GB": "{:.2f}"})
    for name, seconds in found.items():
        table.add(TITLES[name], seconds, None if "stall" in name else nbytes / 1e9 / seconds)
    table.add("dsx, load at the layout of the save", figures["load"]["plain"])
    table.add("dsx, load re-sharded", figures["load"]["sharded"])
    add_goals(table, figures)
    table.save(given.json)


if __name__ == "__main__":
    main()
