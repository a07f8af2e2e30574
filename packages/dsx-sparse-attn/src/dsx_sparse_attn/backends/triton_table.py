"""The tiles, warps and stages with which a Triton kernel is started: a table, and the choice of rows that fit a device.

A row is for a kernel, numbers of 16 or 32 bits, head dimensions up to `dim`, calls with or without a bias, and layout
blocks of at least `least_block` (tiles of 128 would hold too few computed blocks of 16). It has the shared memory that
the kernel needs with any other options, as compiled by Triton 3.7 for sm_80, sm_90 and sm_100. None means that the row
is not used on that architecture: the kernel does not compile in 60 s or spills more than `MOST_SPILLED` bytes per
thread.

Rows for the same calls are in the order in which they are tried: first larger tiles, which load less per product, then
smaller ones for devices with less shared memory. (A program has 166912 bytes on an A100, 232448 on an H100 or B200,
101376 on an L40 or RTX 4090.) No row has been timed on a GPU.

`bench/triton_table.py` compiles the rows and prints these numbers; `tests/test_sparse_triton_ahead.py` compares them
with the compiler's. There is no row for float32 above 128: every choice of tiles spilled 1 KB or more.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

__all__ = [
    "ARCHITECTURES",
    "KERNELS",
    "MAX_DIM",
    "MOST_SPILLED",
    "TABLE",
    "Device",
    "Need",
    "Row",
    "Tiles",
    "column_of",
    "fitting",
]

KERNELS = ("forward", "dq", "dkv")
ARCHITECTURES = (80, 90, 100)
MAX_DIM = 256
MOST_SPILLED = 512


class Device(NamedTuple):
    """The facts of a device: compute capability, bytes of shared memory for one program, number of multiprocessors."""

    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int


class Need(NamedTuple):
    """The demands of a call on a kernel. wide: 32 bits instead of 16. biased: a bias of [queries, keys] is added."""

    kernel: str
    wide: bool
    dim: int
    biased: bool
    block: int


class Tiles(NamedTuple):
    """Queries and keys of a tile, and how Triton starts the kernel."""

    rows: int
    cols: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """The options of Triton's launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


class Row(NamedTuple):
    """A row of the table; `shared`: bytes on each of `ARCHITECTURES`."""

    kernel: str
    wide: bool
    dim: int
    biased: bool
    least_block: int
    tiles: Tiles
    shared: tuple[int | None, int | None, int | None]


def _r(
    kernel: str, bits: int, dim: int, bias: str, least_block: int, tiles: tuple[int, int, int, int], *shared: int | None
) -> Row:
    return Row(kernel, bits == 32, dim, bias == "bias", least_block, Tiles(*tiles), shared)  # type: ignore[arg-type]


# kernel, bits, dim, bias, least block, (rows, cols, warps, stages), shared memory on sm_80, sm_90, sm_100
TABLE: tuple[Row, ...] = (
    _r("forward", 16, 64, "", 64, (128, 64, 8, 2), 33028, 49412, 49956),
    _r("forward", 16, 64, "", 16, (64, 64, 4, 2), 24836, 41984, 41984),
    _r("forward", 16, 64, "bias", 64, (128, 64, 8, 2), 65808, 82944, 82944),
    _r("forward", 16, 64, "bias", 16, (64, 64, 4, 2), 41232, 58368, 58368),
    _r("forward", 16, 128, "", 64, (128, 64, 8, 2), 65796, 98564, 99108),
    _r("forward", 16, 128, "", 16, (64, 64, 4, 2), 57604, 82944, 82944),
    _r("forward", 16, 128, "", 16, (64, 32, 4, 2), 36996, 49284, 49316),
    _r("forward", 16, 128, "bias", 64, (128, 64, 8, 2), 98564, 131332, 131876),
    _r("forward", 16, 128, "bias", 16, (64, 64, 4, 2), 73988, 99328, 99328),
    _r("forward", 16, 128, "bias", 16, (64, 32, 4, 2), 45188, 57476, 57508),
    _r("forward", 16, 256, "", 16, (64, 64, 8, 2), 106756, 164864, 165156),
    _r("forward", 16, 256, "", 16, (64, 32, 8, 1), 53248, 49152, 49160),
    _r("forward", 16, 256, "bias", 16, (64, 64, 8, 2), 123140, 181248, 181540),
    _r("forward", 16, 256, "bias", 16, (64, 32, 8, 1), 53248, 49152, 53248),
    _r("forward", 32, 64, "", 16, (64, 32, 4, 2), 49284, 65668, 32916),
    _r("forward", 32, 64, "", 16, (32, 32, 4, 2), 41092, 41092, 41092),
    _r("forward", 32, 64, "bias", 16, (64, 32, 4, 2), 57476, 73860, 41108),
    _r("forward", 32, 64, "bias", 16, (32, 32, 4, 2), 45188, 45188, 45188),
    _r("forward", 32, 128, "", 16, (32, 32, 8, 1), 49152, 49152, 49152),
    _r("forward", 32, 128, "bias", 16, (32, 32, 8, 1), 49152, 49152, 49152),
    _r("dq", 16, 64, "", 64, (128, 64, 8, 2), 49412, 65796, 74752),
    _r("dq", 16, 64, "", 16, (64, 64, 4, 2), 33028, 50176, 58368),
    _r("dq", 16, 64, "bias", 64, (128, 64, 8, 2), 114960, 132096, 114996),
    _r("dq", 16, 64, "bias", 16, (64, 64, 4, 2), 65808, 82944, 78132),
    _r("dq", 16, 128, "", 64, (128, 64, 8, 2), 98564, 131332, 148480),
    _r("dq", 16, 128, "", 16, (64, 64, 8, 2), 73988, 99328, 115712),
    _r("dq", 16, 128, "", 16, (64, 32, 4, 1), 49152, 49152, 49160),
    _r("dq", 16, 128, "bias", 16, (64, 64, 8, 2), 90372, 132096, 135476),
    _r("dq", 16, 128, "bias", 16, (64, 32, 4, 1), 49152, 49152, 49160),
    _r("dq", 16, 256, "", 16, (64, 32, 8, 2), 102532, 131204, 148480),
    _r("dq", 16, 256, "", 16, (32, 32, 4, 1), 65536, 65536, 65536),
    _r("dq", 16, 256, "bias", 16, (64, 32, 8, 2), 114820, 147588, 164020),
    _r("dq", 16, 256, "bias", 16, (32, 32, 4, 1), 65536, 65536, 65536),
    _r("dq", 32, 64, "", 16, (32, 32, 4, 1), 40960, 40960, 40960),
    _r("dq", 32, 64, "bias", 16, (32, 32, 4, 1), 40960, 40960, 40960),
    _r("dq", 32, 128, "", 16, (32, 32, 8, 1), 81920, 81920, 81920),
    _r("dq", 32, 128, "bias", 16, (32, 32, 8, 1), 81920, 81920, 81920),
    _r("dkv", 16, 64, "", 64, (64, 128, 8, 1), 53248, 49152, 49160),
    _r("dkv", 16, 64, "", 16, (64, 64, 4, 2), 33284, 50176, 66560),
    _r("dkv", 16, 64, "bias", 64, (64, 128, 8, 1), 57344, 57344, 57344),
    _r("dkv", 16, 64, "bias", 16, (64, 64, 8, 1), 40960, 40960, 49152),
    _r("dkv", 16, 128, "", 64, (64, 128, 8, 2), None, 131588, 165888),
    _r("dkv", 16, 128, "", 16, (64, 64, 8, 1), 81920, 65536, 65544),
    _r("dkv", 16, 128, "", 16, (32, 64, 8, 1), 57344, 49152, 49160),
    _r("dkv", 16, 128, "bias", 64, (64, 128, 8, 2), None, 164356, 198656),
    _r("dkv", 16, 128, "bias", 16, (64, 64, 8, 1), 81920, 65536, 81920),
    _r("dkv", 16, 128, "bias", 16, (32, 64, 8, 1), 57344, 49152, 57344),
    _r("dkv", 16, 256, "", 16, (32, 64, 8, 2), 102660, 131332, 164864),
    _r("dkv", 16, 256, "", 16, (32, 32, 8, 1), 81920, 81920, 81920),
    _r("dkv", 16, 256, "bias", 16, (32, 64, 8, 2), 110852, 139524, 173056),
    _r("dkv", 16, 256, "bias", 16, (32, 32, 8, 1), 81920, 81920, 81920),
    _r("dkv", 32, 64, "", 16, (32, 32, 4, 1), 40960, 40960, 40960),
    _r("dkv", 32, 64, "bias", 16, (32, 32, 4, 1), 40960, 40960, 40960),
    _r("dkv", 32, 128, "", 16, (32, 32, 8, 1), 81920, 81920, 81920),
    _r("dkv", 32, 128, "bias", 16, (32, 32, 8, 1), 81920, 81920, None),
    _r("dkv", 32, 128, "bias", 16, (32, 16, 8, 1), 49152, 49152, 49152),
)  # fmt: skip


def column_of(capability: tuple[int, int]) -> int | None:
    """The table's column for a compute capability; None if Triton does not run there.

    For this purpose GPUs of 12.x have the tensor cores of 8.x.
    """
    return {8: 0, 9: 1, 10: 2, 11: 2, 12: 0}.get(capability[0])


@functools.lru_cache(maxsize=1024)
def fitting(need: Need, device: Device) -> tuple[Tiles, ...]:
    """All tiles with which a device can run a kernel, the best first; empty if there are none."""
    column = column_of(device.capability)
    if column is None:
        return ()
    found = []
    for row in TABLE:
        alike = (row.kernel, row.wide, row.biased) == (need.kernel, need.wide, need.biased)
        if alike and row.dim == _dim_class(need.dim) and need.block >= row.least_block:
            shared = row.shared[column]
            if shared is not None and shared <= device.shared_memory:
                found.append(row.tiles)
    return tuple(found)


def _dim_class(dim: int) -> int:
    return 64 if dim <= 64 else 128 if dim <= 128 else 256
