"""What the CUDA kernels move and what they occupy, without a GPU: bytes per element by the emulator, registers, spills
and occupancy by nvcc.

    python packages/dsx-ops/bench/cuda_kernels.py [--archs 80 90 100] [--write]

Prints two tables for Markdown. `--write` puts them into native/cuda/KERNELS.md, and the second one into
native/cuda/emulator/resources.tsv, with which the tests compare. Needs a C++ compiler and nvcc, and about two minutes
of one core. Speed is not in it: no kernel runs on a GPU here.
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

DOCUMENT = resources.SOURCES / "KERNELS.md"
TEXT = """# The CUDA kernels in numbers

Made by `bench/cuda_kernels.py --write`, not by hand. No kernel has run on a GPU yet: these are counts, not speeds.

## Bytes per element

Counted by the emulator. *Must move*: the inputs and outputs. *Moves*: the distinct 32-byte sectors that the launches
touch; partial sums of column sums are in it, and their share falls with the number of rows. *Asks for*: what the
threads load and store, caches included; more than *moves* means that something is read again. *Lanes together*: bytes
asked for per byte of the sectors that the warps ask for; above 100 % lanes share bytes, 50 % means that two loads of a
thread share a sector (eight fp32 neighbours are two words of 16 bytes).

{traffic}

## Registers and occupancy

Compiled by nvcc {release}. Occupancy: the share of a multiprocessor's 2048 threads that can be there at once, for
blocks of the given threads; kernels whose blocks are smaller for short rows hold as many or more. A quarter is enough
here: each thread has 16 to 128 bytes in flight. No kernel spills registers.

{resources}
"""


def traffic_table() -> str:
    """One line per job and dtype."""
    module = build.load(build.build())
    lines = ["| kernel | dtype | must move | moves | asks for | lanes together | bytes per access |", "|---" * 7 + "|"]
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        name = str(dtype).removeprefix("torch.")
        for job in traffic.jobs(module, dtype):
            t = traffic.measure(module, job)
            figures = f"{t.needed:.2f} | {t.moved:.2f} | {t.asked:.2f} | {t.shared:.0%} | {t.width:.1f}"
            lines.append(f"| {t.name} | {name} | {figures} |")
    return "\n".join(lines)


def resources_table(found: list[resources.Resources], archs: list[int]) -> str:
    """One line per kernel."""
    lines = [f"| kernel | threads | {' | '.join(f'sm_{a}: registers, occupancy' for a in archs)} |"]
    lines.append("|---" * (2 + len(archs)) + "|")
    for r in (r for r in found if r.arch == archs[0]):
        same = [o for o in found if (o.source, o.kernel) == (r.source, r.kernel)]
        cells = [f"{o.registers}, {o.occupancy():.0%}" + (f", {o.spilled} B spilled" * (o.spilled > 0)) for o in same]
        lines.append(f"| {r.source}: `{r.kernel}` | {r.threads} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--archs", type=int, nargs="+", default=list(resources.ARCHS))
    parser.add_argument("--write", action="store_true", help="replace KERNELS.md and resources.tsv")
    options = parser.parse_args()
    moved = traffic_table()
    print(moved)
    compiler = resources.nvcc()
    if compiler is None:
        print("no nvcc in CUDA_HOME/bin or on PATH: no table of registers")
        return 1 if options.write else 0
    sources = resources.sources()
    found = [r for arch in options.archs for source in sources for r in resources.measure(source, arch, compiler)]
    occupied = resources_table(found, options.archs)
    print(occupied)
    if options.write:
        resources.write_table(found, compiler)
        release = resources.release(compiler)
        DOCUMENT.write_text(TEXT.format(traffic=moved, resources=occupied, release=release))
    return 0


if __name__ == "__main__":
    sys.exit(main())
