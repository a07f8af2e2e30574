"""Bytes that the 1-bit optimizers send, counted on a GPT 4x256, next to the closed forms. Nothing is timed.

    python packages/dsx-comm/bench/volume.py --ranks 2,4 [--json FILE]

Every kind of round is counted on a short run with real messages; the long schedules are driven by arithmetic with those
counts. Goals: 1-bit Adam at 15 % warm-up at least 4.9 times less than fp16 Adam, 0/1 Adam at least 25 times on the
published schedule (118 K steps), counted bytes within 0.5 % of the closed form.
"""

import argparse
import json
import os
import tempfile

import dsx_comm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dsx_comm.onebit import Rounds, ZeroOnePolicy, onebit_rounds, zero_one_rounds
from dsx_testkit.results import Table, add_json_option

RUNS = {
    "OneBitAdam": {"freeze_step": 2},
    "OneBitLamb": {"freeze_step": 2},
    "ZeroOneAdam": {"var_freeze_step": 5, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 2},
}
SCHEDULES: list[tuple[str, str, Rounds, float]] = [
    ("1-bit Adam, 4000 steps, 15 % warm-up", "OneBitAdam", onebit_rounds(4000, 600), 4.9),
    ("1-bit LAMB, 4000 steps, 15 % warm-up", "OneBitLamb", onebit_rounds(4000, 600), 4.9),
    ("0/1 Adam, 118 K steps, freeze 12.5 K", "ZeroOneAdam", zero_one_rounds(118_000, ZeroOnePolicy(12_500)), 25.0),
    ("0/1 Adam, 4000 steps, freeze 300, scaler 500", "ZeroOneAdam",
     zero_one_rounds(4000, ZeroOnePolicy(300, local_step_scaler=500)), 27.0),
]  # fmt: skip


def shapes(layers: int, d: int, context: int) -> list[tuple[int, ...]]:
    block = [(3 * d, d), (3 * d,), (d, d), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,), (d,), (d,), (d,), (d,)]
    return [(256, d), (context, d), *block * layers, (d,), (d,), (256, d)]


def count(name: str) -> dict[str, float]:
    """{kind of step: bytes this rank sent}, the same in every step of a kind."""
    params = [torch.nn.Parameter(torch.randn(s)) for s in shapes(4, 256, 128)]
    optimizer = getattr(dsx_comm, name)(params, gradient_dtype=torch.float16, **RUNS[name])
    found: dict[str, float] = {}
    for _ in range(9):
        for p in params:
            p.grad = torch.randn_like(p)
        with dsx_comm.count_traffic() as traffic:
            optimizer.step()
        sent = sum(b for _, b in traffic.by_op().values())
        kind = optimizer.last_traffic.kind.value
        assert found.setdefault(kind, sent) == sent
    return {**found, "numel": sum(p.numel() for p in params), "error_bytes": optimizer.error_bytes()}


def worker(rank: int, ranks: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = {name: count(name) for name in RUNS}
    if rank == 0:
        with open(out, "w") as f:
            json.dump(found, f)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    add_json_option(parser)
    args = parser.parse_args()
    table = Table({"schedule": "", "ranks": "", "counted, times less than fp16 Adam": "{:.2f}", "closed form": "{:.2f}",
                   "bytes counted / closed form": "{:.4f}", "goal": "", "errors, bytes per parameter": "{:.2f}",
                   })  # fmt: skip
    worst = 0.0
    for ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "out.json")
            mp.spawn(worker, (ranks, os.path.join(folder, "store"), out), ranks)
            with open(out) as f:
                found = json.load(f)
        for title, name, rounds, goal in SCHEDULES:
            sizes = found[name]
            total = sizes["exact"] * rounds.exact + sizes["one_bit"] * rounds.one_bit
            fp16 = sizes["exact"] * rounds.steps
            close = total / rounds.sent_bytes(sizes["numel"], ranks)
            errors = sizes["error_bytes"] / sizes["numel"]
            table.add(title, ranks, fp16 / total, rounds.reduction(), close, goal, errors)
            worst = max(worst, abs(close - 1))
    table.goal("bytes within 0.5 % of the closed form", f"{worst:.2%} at most", met=worst <= 0.005)
    table.save(args.json)


if __name__ == "__main__":
    main()
