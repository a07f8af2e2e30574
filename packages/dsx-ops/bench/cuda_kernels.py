"""What the CUDA kernels move and what they occupy, without a GPU: bytes per element by the emulator, registers, spills
and occupancy by nvcc.

    python packages/dsx-ops/bench/cuda_kernels.py [--archs 80 90 100] [--only traffic|resources] [--write]

Prints two tables for Markdown. `--write` also replaces native/cuda/emulator/resources.tsv, with which the tests
compare. Needs a C++ compiler; the second table needs nvcc, and about two minutes of one core. Speed is not in it: no
kernel runs on a GPU here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "native" / "cuda" / "emulator"))
import build
import resources
import traffic


def print_traffic() -> None:
    """One line per job and dtype."""
    module = build.load(build.build())
    print("| kernel | dtype | must move | moves | asks for | lanes together | bytes per access |")
    print("|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        name = str(dtype).removeprefix("torch.")
        for job in traffic.jobs(module, dtype):
            t = traffic.measure(module, job)
            figures = f"{t.needed:.2f} | {t.moved:.2f} | {t.asked:.2f} | {t.shared:.0%} | {t.width:.1f}"
            print(f"| {t.name} | {name} | {figures} |", flush=True)


def print_resources(archs: list[int], write: bool) -> int:
    """One line per kernel."""
    compiler = resources.nvcc()
    if compiler is None:
        print("no nvcc in CUDA_HOME/bin or on PATH: no table of registers")
        return 1
    found = [r for arch in archs for source in resources.sources() for r in resources.measure(source, arch, compiler)]
    if write:
        resources.write_table(found, compiler)
    print(f"| kernel | threads | {' | '.join(f'sm_{a}: registers, occupancy' for a in archs)} |")
    print("|---" * (2 + len(archs)) + "|")
    for r in (r for r in found if r.arch == archs[0]):
        same = [o for o in found if (o.source, o.kernel) == (r.source, r.kernel)]
        cells = [f"{o.registers}, {o.occupancy():.0%}" + (f", {o.spilled} B spilled" * (o.spilled > 0)) for o in same]
        print(f"| {r.source}: `{r.kernel}` | {r.threads} | {' | '.join(cells)} |")
    return 0


def main() -> int:
    """Both tables, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archs", type=int, nargs="+", default=list(resources.ARCHS))
    parser.add_argument("--only", choices=["traffic", "resources"])
    parser.add_argument("--write", action="store_true", help="replace resources.tsv")
    options = parser.parse_args()
    if options.only != "resources":
        print_traffic()
    return print_resources(options.archs, options.write) if options.only != "traffic" else 0


if __name__ == "__main__":
    sys.exit(main())
