"""Matrix-vector products over int8 and int4 codes beside fp32, over more memory than the caches hold.

    python packages/dsx-ops/bench/quantized_matvec.py [--size 4096] [--megabytes 512] [--threads 2] [--rounds 60]
        [--json FILE]

Goals: int8 >= 3.0x, int4 >= 5x of fp32 in one run. Medians of interleaved rounds; each round takes the next matrix of a
set that is larger than the last-level cache.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from dsx_ops import native
from dsx_ops.quantized_matvec import available, matvec
from dsx_testkit.results import Table, add_json_option


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--megabytes", type=int, default=512, help="of each set of matrices, at most 64 of them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = options.size
    count = lambda bits: min(64, max(2, options.megabytes * 2**23 // (size * size * bits)))  # noqa: E731
    dense = [torch.randn(size, size) for _ in range(count(32))]
    int8 = [torch.randint(-128, 128, (size, size), dtype=torch.int8) for _ in range(count(8))]
    int4 = [torch.randint(0, 256, (size, size // 2), dtype=torch.uint8) for _ in range(count(4))]
    x, scale = torch.randn(1, size), torch.rand(size)
    systems = {
        "fp32": lambda i: torch.nn.functional.linear(x, dense[i % len(dense)]),
        "int8": lambda i: matvec(x, int8[i % len(int8)], scale, "int8"),
        "int4": lambda i: matvec(x, int4[i % len(int4)], scale, "int4"),
    }
    times: dict[str, list[float]] = {name: [] for name in systems}
    for i in range(options.rounds):
        for name, run in systems.items():
            start = time.perf_counter()
            run(i)
            times[name].append(time.perf_counter() - start)
    module = native.module()
    print(f"kernels: {module.isa() if available() and module else 'none, the reference is measured'}")
    table = Table({"codes": "", "matrices": "", "ms": "{:.3f}", "against fp32": "{:.2f}x"})
    sets, goals = {"fp32": dense, "int8": int8, "int4": int4}, {"int8": 3.0, "int4": 5.0}
    for name, measured in times.items():
        ratio = median(times["fp32"]) / median(measured)
        table.add(name, len(sets[name]), 1e3 * median(measured), ratio)
        if name in goals:
            table.goal(f"{name} at least {goals[name]}x of fp32", f"{ratio:.2f}x", met=ratio >= goals[name])
    table.save(options.json)


if __name__ == "__main__":
    main()
