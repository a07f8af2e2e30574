"""Step time over the "dsx" backend with flat buffers in memory that the ranks share, against the same in ordinary
memory.

    python packages/dsx-zero/bench/shared_memory.py [--stages 0,1,2,3] [--steps 60] [--json FILE]

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
from dsx_testkit.results import Table, add_json_option
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
    table = Table({"stage": "", "shared ms": "{:.1f}", "ordinary ms": "{:.1f}", "ratio": "{:.3f}",
                   "losses differ by": "{:g}", "kept between backwards, MiB per rank": "{:.1f}"})  # fmt: skip
    for stage in map(int, args.stages.split(",")):
        built = {name: build(stage, name == "shared", rank) for name in ("shared", "ordinary")}
        found = take_turns({name: step for name, (step, _) in built.items()}, args.steps)
        if rank == 0:
            kept = built["shared"][1].state_bytes()["buffers"] / 2**20
            ratio, apart = found.ratio("shared", "ordinary"), found.apart("shared", "ordinary")
            table.add(stage, found.median("shared"), found.median("ordinary"), ratio, apart, kept)
    if rank == 0:
        slowest = min(row["ratio"] for row in table.rows)  # pyright: ignore[reportArgumentType]
        table.goal("not slower at any stage", f"{slowest:.3f} at least", met=slowest >= 1)
        table.save(args.json)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stages", default="0,1,2,3")
    add_json_option(parser)
    args = parser.parse_args()
    spawn_ranks(worker, args.ranks, args)


if __name__ == "__main__":
    main()
