"""Time of the collectives on shared memory against gloo (and mpi where torch has it), side by side in one run, with the
goals.

    python packages/dsx-comm/bench/collectives.py                      # the slices below, one after the other
    python packages/dsx-comm/bench/collectives.py --slice large        # one of them (each takes about a minute)

`small` times ten calls on end, `single` the same calls one at a time, which is mostly how far apart the ranks begin. It
is `dsx bench comm` with fixed arguments; the columns are explained there. Goals: 64 MiB all_reduce >= 8x gloo and >=
0.80 of the floor, all_gather and reduce_scatter >= 12x; 1-4 KiB all_reduce and barrier >= 30x with free cores; 4 ranks
on 2 cores >= 4x at every size; on symmetric tensors >= 0.9 of the floor.
"""

import argparse

import torch.distributed as dist
from dsx_comm import benchmark

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", choices=SLICES)
    options = parser.parse_args()
    if not dist.is_mpi_available():
        print("mpi: not in this torch, not measured")
    for name in [options.slice] if options.slice else SLICES:
        print(f"\n{name}")
        benchmark.main(SLICES[name])


if __name__ == "__main__":
    main()
