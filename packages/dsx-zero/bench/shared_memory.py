"""Step time over the "dsx" backend with flat buffers in memory that the ranks share, against the same in ordinary
memory.

    python packages/dsx-zero/bench/shared_memory.py [--stages 0,1,2,3] [--steps 60]

Both models train in the same processes, one step of each in turn (GPT 6 x 512, 19 M parameters, fp32, batch 1 x 64,
AdamW), so that a disturbance meets both. What is kept between backwards are pages for gradients (ordinary memory goes
back, or stays with the C library). Goal: not slower at any stage.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from unittest.mock import patch

import dsx_comm
import dsx_zero
import torch
from dsx_testkit.benches import GPT, batch, spawn_ranks, take_turns
from dsx_zero.params.memory import OrdinaryMemory


def build(stage: int, shared: bool, rank: int) -> tuple[Callable[[int], float], dsx_zero.ZeroOptimizer]:
    """The training step of a model whose flat buffers are shared where the stage has them so, or ordinary."""
    torch.manual_seed(0)
    model, make = GPT(), lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)
    if shared:
        model, optimizer = dsx_zero.shard(model, make, stage=stage)
    else:
        ordinary = lambda *_: OrdinaryMemory()  # noqa: E731
        with patch("dsx_zero.building.memory_of", ordinary), patch("dsx_zero.gather.stage3.memory_of", ordinary):
            model, optimizer = dsx_zero.shard(model, make, stage=stage)

    def step(turn: int) -> float:
        loss = model(*batch(turn, rank, size=1, length=64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, optimizer


def worker(rank: int, store: str, args: argparse.Namespace) -> None:
    """One rank."""
    dsx_comm.init_distributed("dsx", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    for stage in map(int, args.stages.split(",")):
        built = {name: build(stage, name == "shared", rank) for name in ("shared", "ordinary")}
        found = take_turns({name: step for name, (step, _) in built.items()}, args.steps)
        if rank == 0:
            kept = built["shared"][1].state_bytes()["buffers"] / 2**20
            print(
                f"stage {stage}: shared {found.median('shared'):.1f} ms, ordinary {found.median('ordinary'):.1f} ms,"
                f" median of paired ratios {found.ratio('shared', 'ordinary'):.3f}, losses differ by"
                f" {found.apart('shared', 'ordinary'):g}, kept between backwards {kept:.1f} MiB",
                flush=True,
            )


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stages", default="0,1,2,3")
    args = parser.parse_args()
    spawn_ranks(worker, args.ranks, args)


if __name__ == "__main__":
    main()
