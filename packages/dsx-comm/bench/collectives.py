"""Time of the collectives against plain torch.distributed on the same gloo group, side by side in one run.

    python packages/dsx-comm/bench/collectives.py --ranks 2 --sizes 4K,1M,64M --repeats 20

Each row is one operation and size (bytes of the larger side): median and minimum of both in ms, and the ratio of the
medians. Both are called in turn within each repeat, so that a disturbance meets both. Run it on a quiet machine.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

import dsx_comm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_size(text: str) -> int:
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
    return int(text.rstrip("KM")) * factor


def operations(numel: int, ranks: int, dtype: torch.dtype):
    """{name: (ours, torch's)} on fresh tensors."""
    whole, part = torch.ones(numel, dtype=dtype), torch.ones(numel // ranks, dtype=dtype)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all_reduce": (lambda: dsx_comm.all_reduce(whole), lambda: dist.all_reduce(whole)),
        "all_gather": (lambda: dsx_comm.all_gather_into_tensor(whole, part), lambda: gather(whole, part)),
        "reduce_scatter": (lambda: dsx_comm.reduce_scatter_tensor(part, whole), lambda: scatter(part, whole)),
        "broadcast": (lambda: dsx_comm.broadcast(whole, 0), lambda: dist.broadcast(whole, 0)),
        "barrier": (dsx_comm.barrier, dist.barrier),
    }


def timed(call) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def worker(rank: int, args: argparse.Namespace, store: str, out: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    rows = []
    for size in map(parse_size, args.sizes.split(",")):
        dtype = DTYPES[args.dtype]
        numel = size // dtype.itemsize // args.ranks * args.ranks
        for name, pair in operations(numel, args.ranks, dtype).items():
            times: tuple[list[float], list[float]] = ([], [])
            for repeat in range(args.warmup + args.repeats):
                for column, call in zip(times, pair):
                    dist.barrier()
                    spent = timed(call)
                    if repeat >= args.warmup:
                        column.append(spent)
            ours, theirs = (statistics.median(c) for c in times)
            rows.append(
                {"op": name, "bytes": size, "dsx_ms": ours, "dsx_min_ms": min(times[0]), "gloo_ms": theirs,
                 "gloo_min_ms": min(times[1]), "ratio": theirs / ours}
            )  # fmt: skip
    if rank == 0:
        with open(out, "w") as f:
            json.dump(rows, f)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="4K,64K,1M,16M,64M")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = args.json or os.path.join(folder, "rows.json")
        mp.spawn(worker, (args, os.path.join(folder, "store"), out), args.ranks)
        with open(out) as f:
            rows = json.load(f)
    print(f"{'op':<16}{'bytes':>12}{'dsx ms':>10}{'min':>10}{'gloo ms':>10}{'min':>10}{'gloo/dsx':>10}")
    for r in rows:
        numbers = (r[k] for k in ("dsx_ms", "dsx_min_ms", "gloo_ms", "gloo_min_ms", "ratio"))
        print(f"{r['op']:<16}{r['bytes']:>12}" + "".join(f"{n:>10.3f}" for n in numbers))


if __name__ == "__main__":
    main()
