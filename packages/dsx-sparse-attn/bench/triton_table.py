"""Compiles the rows of `dsx_sparse_attn.backends.triton_table` for every architecture and prints what they need.

    python packages/dsx-sparse-attn/bench/triton_table.py [--kernel dkv ...] [--dim 256 ...] [--jobs 2]

No GPU is needed. Run it when kernels, tiles or the version of Triton change, and copy the printed rows into the table:
shared memory is the most of all options; None stands where a kernel spills too much or takes too long to compile.
Columns after `#`: most registers, most spilled bytes and CPU seconds per architecture. The whole table takes half an
hour of one core.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from dsx_sparse_attn import SparseAttentionError
from dsx_sparse_attn.ahead import LONGEST, OPTIONS, Compiled, compile_row
from dsx_sparse_attn.backends.triton_table import ARCHITECTURES, KERNELS, MOST_SPILLED, TABLE, Row


def most(row: Row, arch: int) -> Compiled | None:
    """The most of everything over all options; None when one does not compile."""
    try:
        found = [compile_row(row, arch, option) for option in OPTIONS]
    except SparseAttentionError as error:
        print(f"# {row} on sm_{arch}: {error}")
        return None
    return Compiled(*map(max, zip(*found, strict=True)))


def line(row: Row) -> str:
    """The row as it stands in the table, with what was found."""
    shared: list[str] = []
    notes: list[str] = []
    for arch in ARCHITECTURES:
        found = most(row, arch)
        good = found is not None and found.spilled <= MOST_SPILLED and found.seconds <= LONGEST
        shared.append(str(found.shared) if good and found is not None else "None")
        notes.append("-" if found is None else f"{found.registers}/{found.spilled}/{found.seconds:.1f}s")
    bias = '"bias"' if row.biased else '""'
    tiles = ", ".join(map(str, row.tiles))
    return (
        f'    _r("{row.kernel}", {32 if row.wide else 16}, {row.dim}, {bias}, {row.least_block}, ({tiles}), '
        f"{', '.join(shared)}),  # {' '.join(notes)}"
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", nargs="*", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--dim", nargs="*", type=int, default=[64, 128, 256])
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    rows = [row for row in TABLE if row.kernel in arguments.kernel and row.dim in arguments.dim]
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for printed in pool.map(line, rows):
            print(printed, flush=True)


if __name__ == "__main__":
    main()
