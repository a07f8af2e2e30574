"""Time of the collectives on shared memory against gloo (and mpi where torch has it), side by side in one run, with the
goals.

    python packages/dsx-comm/bench/collectives.py                      # the slices below, one after the other
    python packages/dsx-comm/bench/collectives.py --slice large        # one of them (each takes about a minute)
    python packages/dsx-comm/bench/collectives.py --json FILE          # and write a table per slice

`small` times ten calls on end, `single` the same calls one at a time, which is mostly how far apart the ranks begin. It
is `dsx bench comm` with fixed arguments; the columns are explained there. Goals: 64 MiB all_reduce >= 8x gloo and >=
0.80 of the floor, all_gather and reduce_scatter >= 12x; 1-4 KiB all_reduce and barrier >= 30x with free cores; 4 ranks
on 2 cores >= 4x at every size; on symmetric tensors >= 0.9 of the floor.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch.distributed as dist
from dsx_comm import benchmark
from dsx_testkit.results import Table, add_json_option

MAIN = "all_reduce,all_gather,reduce_scatter"
SMALL = ["--ranks", "2", "--sizes", "1K,4K,64K", "--ops", f"{MAIN},broadcast,barrier"]
SLICES = {
    "small": [*SMALL, "--repeats", "51", "--calls", "10"],
    "single": [*SMALL, "--repeats", "101"],
    "large": ["--ranks", "2", "--sizes", "1M,64M", "--ops", MAIN, "--repeats", "11"],
    "symmetric": [
        "--ranks",
        "2",
        "--sizes",
        "64M",
        "--ops",
        MAIN,
        "--backends",
        "dsx-symmetric,dsx",
        "--repeats",
        "15",
    ],
    "crowded": ["--ranks", "4", "--sizes", "1K,64K,1M,16M", "--ops", f"{MAIN},barrier", "--repeats", "11"],
    "others": ["--ranks", "2", "--sizes", "4K,1M", "--ops", "reduce,gather,scatter,all_to_all,send", "--repeats", "11"],
}


GOALS = {
    "small": {"all_reduce": {1 << 10: (30, None), 1 << 12: (30, None)}, "barrier": {1 << 10: (30, None)}},
    "large": {"all_reduce": {64 << 20: (8, 0.80)}, "all_gather": {64 << 20: (12, None)},
              "reduce_scatter": {64 << 20: (12, None)}},
    "symmetric": {op: {64 << 20: (None, 0.90)} for op in MAIN.split(",")},
    "crowded": {op: {size << 10: (4, None) for size in (1, 64, 1 << 10, 16 << 10)} for op in MAIN.split(",")},
}  # fmt: skip
"""By slice, operation and bytes: times faster than the second backend, and share of the floor."""


def measure(name: str) -> Table:
    """Run a slice, and make a table of its rows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        if benchmark.main([*SLICES[name], "--json", str(file)]):
            raise SystemExit(f"dsx bench comm refused the slice {name!r}")
        rows = json.loads(file.read_text())
    ours, *peers = rows[0]["times"]
    table = Table({"operation": "", "bytes": "{:,}", f"{ours} ms": "{:.4f}", **{f"{p} ms": "{:.4f}" for p in peers},
                   **{f"x {p}": "{:.1f}" for p in peers}, "of floor": "{:.2f}"}, name)  # fmt: skip
    for row in rows:
        first, others = row["times"][ours], [row["times"][p] for p in peers]
        floor = row["floor"] / first if row["floor"] and row["nbytes"] >= 1 << 20 else None
        table.add(row["op"], row["nbytes"], first, *others, *(other / first for other in others), floor)
        times, share = GOALS.get(name, {}).get(row["op"], {}).get(row["nbytes"], (None, None))
        where = f"{row['op']}, {row['nbytes']} bytes"
        if times is not None:
            ratio = others[0] / first
            table.goal(f"{where}: at least {times}x {peers[0]}", f"{ratio:.1f}x", met=ratio >= times)
        if share is not None and floor is not None:
            table.goal(f"{where}: at least {share} of the floor", f"{floor:.2f}", met=floor >= share)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", choices=SLICES)
    add_json_option(parser)
    options = parser.parse_args()
    if not dist.is_mpi_available():
        print("mpi: not in this torch, not measured")
    for name in [options.slice] if options.slice else SLICES:
        print(f"\n{name}")
        measure(name).save(options.json)


if __name__ == "__main__":
    main()
