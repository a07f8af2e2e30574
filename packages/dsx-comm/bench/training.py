"""Step time of DDP and FSDP2 on a GPT of 19 M parameters: the dsx backend against gloo, in the same processes, step by
step in turn; in fp32, and in bf16 as people write it (autocast under DDP, a policy of FSDP2).

    python packages/dsx-comm/bench/training.py --ranks 2 --steps 9 [--json FILE]

Rows where gloo wins come first. Losses must be equal to the last bit where the arithmetic is (2 ranks: a sum of two has
one order). Goals: never slower, FSDP2 >= 1.15x.
"""

import argparse
from collections.abc import Callable

import dsx_comm  # noqa: F401  (registers the backend)
import torch
import torch.distributed as dist
from dsx_testkit.benches import GPT, PRECISIONS, batch, losers_first, spawn_ranks, take_turns
from dsx_testkit.results import Table, add_json_option
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

LENGTH = 64
GOALS = {"ddp": 1.0, "fsdp2": 1.15}


def build(kind: str, precision: str, group: dist.ProcessGroup, rank: int, size: int) -> Callable[[int], float]:
    """The training step of a model under DDP or FSDP2 over `group`."""
    torch.manual_seed(0)
    model: nn.Module = GPT()
    if kind == "ddp":
        model = DistributedDataParallel(model, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if precision == "bf16" else None)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(turn: int) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16" and kind == "ddp"):
            loss = model(*batch(turn, rank, size, LENGTH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def worker(rank: int, store: str, args: argparse.Namespace) -> None:
    """One rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    groups = {name: dist.new_group(backend=name) for name in ("dsx", "gloo")}
    table = Table({"step of a 19 M GPT": "", "dsx ms": "{:.0f}", "gloo ms": "{:.0f}", "ratio": "{:.2f}",
                   "losses differ by": "{:g}"})  # fmt: skip
    rows = []
    for kind in args.kinds.split(","):
        for precision in PRECISIONS:
            steps = {name: build(kind, precision, group, rank, args.batch) for name, group in groups.items()}
            found = take_turns(steps, args.steps, warmup=1)
            ours, theirs, least = found.median("dsx"), found.median("gloo"), GOALS[kind]
            name = f"{kind}, {precision}, batch {args.batch}"
            rows.append((name, ours, theirs, theirs / ours, found.apart("dsx", "gloo")))
            table.goal(f"{name}: at least {least}x gloo", f"{theirs / ours:.2f}x", met=theirs / ours >= least)
    for row in losers_first(rows, 3) if rank == 0 else ():
        table.add(*row)
    if rank == 0:
        table.save(args.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--kinds", default="ddp,fsdp2")
    add_json_option(parser)
    args = parser.parse_args()
    spawn_ranks(worker, args.ranks, args)


if __name__ == "__main__":
    main()
