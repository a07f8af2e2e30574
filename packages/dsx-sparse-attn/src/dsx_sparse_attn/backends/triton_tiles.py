"""Lists of the tiles that the Triton kernels compute, made from a layout.

A tile is as wide as a kernel's products (16 to 128 positions), whatever the layout's block: several small blocks make
one tile, and a large block makes several tiles. A tile with at least one computed block is listed, with bits that say
which of its blocks are computed. Tiles in which every element is computed are listed separately ("full"), because a
kernel need not mask them.

This is plain PyTorch on any device. The caller caches the result (`cache.py`), because making it sorts the layout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["MAX_BLOCKS_PER_TILE", "Grid", "TileLists", "tile_lists"]

MAX_BLOCKS_PER_TILE = 32  # bits of an int32


class Grid(NamedTuple):
    """The sizes that determine the tiles of a call: positions, positions per block, rows and columns of a tile."""

    seq: int
    block: int
    rows: int
    cols: int
    causal: bool

    @property
    def blocks_per_tile(self) -> tuple[int, int]:
        """Blocks of a tile down and across; 1 if a block is at least as wide as the tile."""
        return max(1, self.rows // self.block), max(1, self.cols // self.block)


class TileLists(NamedTuple):
    """Lists of tiles; a list belongs to one row of tiles (queries), or to one column (keys), of one head of the layout.

    List l has its partial tiles at starts[2l] : starts[2l + 1] of `items` and `bits`, and its full tiles at starts[2l +
        1] : starts[2l + 2].
    """

    starts: Tensor  # int32 [2 * lists + 1]
    items: Tensor  # int32 [tiles listed]: column of tiles (row of tiles in lists of columns)
    bits: Tensor  # int32 [tiles listed]: bit (row of blocks * blocks across + column of blocks) of the computed blocks
    order: Tensor  # int32 [lines]: the order in which programs take lines, long ones first; a line is `together` lists
    long_lines: int  # how many lines at the front of `order` are long
    tiles: int  # lists per head of the layout


def tile_lists(layout: Tensor, grid: Grid, *, columns: bool, together: int = 1) -> TileLists:
    """The lists of a layout.

    Args:
        layout: [1 or heads, blocks, blocks], nonzero where a block is computed.
        grid: the sizes; a tile may hold at most `MAX_BLOCKS_PER_TILE` blocks.
        columns: list the rows that are computed with each column, instead of the columns computed with each row.
        together: how many heads of the layout one program takes (the query heads that share a key head).
    """
    bits = _bits_of_tiles(layout, grid)
    down, across = grid.blocks_per_tile
    full = (bits == (1 << (down * across)) - 1) & _inside(bits.shape[1], bits.shape[2], grid, layout.device)
    kinds = torch.stack([(bits != 0) & ~full, full], 2)  # [layouts, rows, 2, columns]
    if columns:
        kinds, bits = kinds.permute(0, 3, 2, 1), bits.transpose(1, 2)
    layouts, tiles = kinds.shape[:2]
    head, line, _, item = kinds.nonzero(as_tuple=True)  # in the order of the lists
    counts = kinds.sum(-1, dtype=torch.int64)
    starts = F.pad(counts.flatten().cumsum(0), (1, 0))
    per_line = counts.sum(-1).view(layouts // together, together, tiles).sum(1).flatten()
    # A list that is twice as long as the average (of a global block) would end long after the others if it started
    # last.
    long = per_line > 2 * (per_line.sum() // per_line.numel() + 1)
    return TileLists(
        starts.to(torch.int32),
        item.to(torch.int32),
        _wrapped(bits[head, line, item]),
        (~long).to(torch.int8).argsort(stable=True).to(torch.int32),
        int(long.sum()),
        tiles,
    )


def _bits_of_tiles(layout: Tensor, grid: Grid) -> Tensor:
    """int64 [layouts, rows of tiles, columns of tiles]: the computed blocks of every tile as bits."""
    active = (layout.tril() if grid.causal else layout) != 0
    down, across = grid.blocks_per_tile
    high, wide = -(-grid.seq // grid.rows), -(-grid.seq // grid.cols)
    # A block larger than a tile is repeated for each of its tiles; then tiles are filled up with blocks that are not
    # computed.
    active = active.repeat_interleave(max(1, grid.block // grid.rows), 1)
    active = active.repeat_interleave(max(1, grid.block // grid.cols), 2)
    active = active[:, : high * down, : wide * across]
    active = F.pad(active, (0, wide * across - active.shape[2], 0, high * down - active.shape[1]))
    parts = active.view(-1, high, down, wide, across).transpose(2, 3).reshape(-1, high, wide, down * across)
    weights = 1 << torch.arange(down * across, device=layout.device)
    return (parts * weights).sum(-1)


def _inside(high: int, wide: int, grid: Grid, device: torch.device) -> Tensor:
    """bool [rows of tiles, columns of tiles]: tiles that neither the sequence's end nor the causal diagonal cuts."""
    last_row = (torch.arange(high, device=device)[:, None] + 1) * grid.rows
    last_col = (torch.arange(wide, device=device)[None, :] + 1) * grid.cols
    inside = (last_row <= grid.seq) & (last_col <= grid.seq)
    if grid.causal:
        inside = inside & (last_col - 1 <= last_row - grid.rows)
    return inside


def _wrapped(bits: Tensor) -> Tensor:
    """Unsigned 32-bit numbers, given as int64, as int32 numbers with the same bits."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
