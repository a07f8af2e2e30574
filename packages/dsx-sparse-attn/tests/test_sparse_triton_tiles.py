"""Lists of tiles for the Triton kernels: every element that the layout computes, once, whatever the sizes of blocks and
tiles.
"""

import pytest
import torch
from dsx_sparse_attn.backends.triton_tiles import MAX_BLOCKS_PER_TILE, Grid, tile_lists


def random_layout(heads, blocks, density, seed=0):
    made = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(seed)) < density
    made[:, :, 0] = True  # a global column; so no list of rows is empty
    made[:, 1, 1:] = False
    made[-1, 2] = True  # a global row
    return made


def wanted(layout, grid):
    """bool [heads, seq, seq]: what is to be computed, apart from causality inside blocks."""
    blocks = layout.tril() if grid.causal else layout
    return blocks.repeat_interleave(grid.block, 1).repeat_interleave(grid.block, 2)[:, : grid.seq, : grid.seq]


def listed(lists, grid, heads, columns):
    """(what the lists compute as the kernels read them, the elements of full tiles), both bool [heads, seq, seq], and
    the tiles of each list.
    """
    high, wide = -(-grid.seq // grid.rows) * grid.rows, -(-grid.seq // grid.cols) * grid.cols
    computed, full = (torch.zeros(heads, high, wide, dtype=torch.int32) for _ in range(2))
    starts, across = lists.starts.tolist(), grid.blocks_per_tile[1]
    shift = grid.block.bit_length() - 1
    i, j = torch.arange(grid.rows)[:, None] >> shift, torch.arange(grid.cols) >> shift
    for line in range(heads * lists.tiles):
        head, tile = divmod(line, lists.tiles)
        for kind in (0, 1):
            for at in range(starts[2 * line + kind], starts[2 * line + kind + 1]):
                row, col = (int(lists.items[at]), tile) if columns else (tile, int(lists.items[at]))
                place = (
                    head,
                    slice(row * grid.rows, (row + 1) * grid.rows),
                    slice(col * grid.cols, (col + 1) * grid.cols),
                )
                computed[place] += 1 if kind else (int(lists.bits[at]) >> (i * across + j)) & 1
                full[place] += kind
    assert computed.max() <= 1, "a tile is listed once"
    return computed[:, : grid.seq, : grid.seq].bool(), full.bool()


GRIDS = [
    Grid(256, 16, 64, 64, False),
    Grid(256, 16, 128, 64, True),
    Grid(250, 32, 64, 32, True),
    Grid(100, 32, 32, 64, False),
    Grid(300, 128, 64, 32, True),
    Grid(256, 64, 64, 128, False),
    Grid(5, 16, 32, 32, False),
]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_lists_hold_what_the_layout_computes(grid, columns):
    blocks = -(-grid.seq // grid.block)
    layout = random_layout(3, max(blocks, 3), 0.5)[:, :blocks, :blocks]
    lists = tile_lists(layout, grid, columns=columns)
    computed, full = listed(lists, grid, 3, columns)
    expected = wanted(layout, grid)
    assert torch.equal(computed, expected)
    # Full tiles are computed without a look at their elements: all must be wanted, inside, and seen by a causal query.
    seq = grid.seq
    assert not full[:, seq:].any() and not full[:, :, seq:].any()
    seen = expected.tril() if grid.causal else expected
    assert (full[:, :seq, :seq] <= seen).all()
    assert sorted(lists.order.tolist()) == list(range(3 * lists.tiles))


@pytest.mark.parametrize("causal", [False, True])
def test_all_tiles_that_need_no_mask_are_full(causal):
    grid = Grid(256, 16, 64, 32, causal)
    lists = tile_lists(torch.ones(1, 16, 16), grid, columns=False)
    _, full = listed(lists, grid, 1, False)
    i, j = torch.arange(4)[:, None], torch.arange(8)
    expected = (j * 32 + 31 <= i * 64) if causal else torch.ones(4, 8, dtype=torch.bool)
    assert torch.equal(full[0, ::64, ::32], expected)


def test_long_lists_come_first_and_heads_that_share_a_program_count_together():
    layout = torch.eye(16).repeat(4, 1, 1)
    layout[1, 5] = 1  # head 1 has a global row
    grid = Grid(256, 16, 16, 16, False)
    rows = tile_lists(layout, grid, columns=False)
    assert (
        rows.long_lines == 1
        and rows.order[0] == 16 + 5
        and rows.order[1:].tolist() == [n for n in range(64) if n != 21]
    )
    columns = tile_lists(layout.transpose(1, 2), grid, columns=True, together=2)
    assert columns.order.numel() == 32 and columns.long_lines == 1 and columns.order[0] == 5


def test_the_highest_bit_survives():
    down, across = 128 // 16, 64 // 16
    assert down * across == MAX_BLOCKS_PER_TILE
    layout = torch.zeros(1, 8, 8)
    layout[0, 7, 3] = 1
    lists = tile_lists(layout, Grid(128, 16, 128, 64, False), columns=False)
    assert lists.bits.tolist() == [-(1 << 31)] and lists.items.tolist() == [0]


def test_empty_layouts_have_empty_lists():
    lists = tile_lists(torch.zeros(2, 4, 4), Grid(64, 16, 32, 32, False), columns=False)
    assert lists.items.numel() == 0 and lists.starts.eq(0).all() and lists.long_lines == 0
