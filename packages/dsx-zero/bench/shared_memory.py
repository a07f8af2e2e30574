"""Step time over the "dsx" backend with flat buffers in memory that the ranks share, against the same in ordinary
memory.

    python packages/dsx-zero/bench/shared_memory.py [--stages 0,1,2,3] [--steps 60]

Both models train in the same processes, one step of each in turn (GPT 6 x 512, 19 M parameters, fp32, batch 1 x 64,
AdamW), so that a disturbance meets both. What is kept between backwards are pages for gradients (ordinary memory goes
back, or stays with the C library). Goal: not slower at any stage.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import dsx_comm
import dsx_zero
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dsx_zero import api
from dsx_zero.gather import stage3
from dsx_zero.params import memory

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "dsx-comm" / "bench"))


def build(stage: int, shared: bool) -> tuple[torch.nn.Module, dsx_zero.ZeroOptimizer]:
    """A model whose flat buffers are shared where the stage has them so, or ordinary."""
    from training import Gpt

    torch.manual_seed(0)
    choice = memory.memory_of if shared else lambda group: memory.OrdinaryMemory()
    api.memory_of = stage3.memory_of = choice
    return dsx_zero.shard(Gpt(), lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), stage=stage)


def worker(rank: int, args: argparse.Namespace, store: str) -> None:
    """One rank."""
    from training import LENGTH, VOCABULARY, step

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dsx_comm.init_distributed("dsx", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    for stage in map(int, args.stages.split(",")):
        runs = {name: build(stage, name == "shared") for name in ("shared", "ordinary")}
        times: dict[str, list[float]] = {name: [] for name in runs}
        losses: dict[str, float] = {}
        for i in range(args.steps + 3):
            tokens = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(i * 8 + rank))
            for name in sorted(runs, reverse=bool(i % 2)):
                model, optimizer = runs[name]
                dist.barrier()
                began = time.perf_counter()
                losses[name] = step(model, optimizer, tokens)
                dist.barrier()
                if i >= 3:
                    times[name].append((time.perf_counter() - began) * 1e3)
        if rank == 0:
            ours, theirs = (statistics.median(times[n]) for n in ("shared", "ordinary"))
            pairs = statistics.median(b / a for a, b in zip(times["shared"], times["ordinary"]))
            print(
                f"stage {stage}: shared {ours:.1f} ms, ordinary {theirs:.1f} ms, median of paired ratios {pairs:.3f}, "
                f"losses {losses['shared']:.6f} {losses['ordinary']:.6f}, "
                f"kept between backwards {runs['shared'][1].state_bytes()['buffers'] / 2**20:.1f} MiB",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stages", default="0,1,2,3")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args, os.path.join(folder, "store")), args.ranks)


if __name__ == "__main__":
    main()
