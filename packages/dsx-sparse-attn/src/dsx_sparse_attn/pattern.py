"""The base of sparsity configs, and checks and parts of layouts that several use; the configs are in `patterns`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import LayoutError
from .layout import Layout

__all__ = ["RandomAndGlobal", "SparsityConfig", "checked_direction", "checked_int", "global_ranges", "set_square"]

_DIRECTIONS = ("unidirectional", "bidirectional")


def checked_int(name: str, value: int, least: int) -> int:
    """`value`, if it is an int of at least `least`. Raises `LayoutError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LayoutError(f"got {name}={value!r}, expected an int >= {least}")
    return value


def checked_direction(value: str) -> str:
    """`value`, if it is "unidirectional" or "bidirectional". Raises `LayoutError`."""
    if value not in _DIRECTIONS:
        raise LayoutError(f'got attention={value!r}, expected "unidirectional" or "bidirectional"')
    return value


class SparsityConfig:
    """Base class of all patterns: heads, block size, and whether heads differ."""

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        """
        Args:
            num_heads: heads of the attention.
            block: positions per block, in both directions.
            different_layout_per_head: draw a layout for every head instead of one for all heads.

        Raises:
            LayoutError: a number is below 1.
        """
        self.num_heads = checked_int("num_heads", num_heads, 1)
        self.block = checked_int("block", block, 1)
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> Tensor:
        """Zeros [heads, blocks, blocks]. Raises `LayoutError` if `seq_len` is not a multiple of the block."""
        if seq_len < 1 or seq_len % self.block != 0:
            raise LayoutError(
                f"got a sequence of {seq_len}, expected a multiple of the block, {self.block}: "
                "SparseAttentionUtils.pad_to_block_size pads a batch; covering(seq_len) rounds the layout up"
            )
        blocks = seq_len // self.block
        return torch.zeros((self.num_heads, blocks, blocks), dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Copy head 0 to all heads, unless each has its own layout. In place; returns `layout`."""
        if not self.different_layout_per_head:
            layout[1:] = layout[:1]
        return layout

    def make_layout(self, seq_len: int) -> Layout:
        """The layout for `seq_len` positions, int64 [heads, blocks, blocks].

        Raises:
            LayoutError: the length is not a multiple of the block, or is too short for the pattern.
        """
        layout = self.setup_layout(seq_len)
        self.check_length(layout.shape[-1])
        for head in range(self.num_layout_heads):
            self.fill(layout[head], head)
        return Layout(self.check_and_propagate_first_head_layout(layout), self.block)

    def covering(self, seq_len: int) -> Layout:
        """The layout for `seq_len`, rounded up to a multiple of the block; `block_sparse_attention` takes shorter
        tensors.
        """
        return self.make_layout(-(-seq_len // self.block) * self.block)

    def check_length(self, blocks: int) -> None:
        """Raise `LayoutError` if the pattern needs more blocks."""

    def fill(self, rows: Tensor, head: int) -> None:
        """Set the ones of one head, [blocks, blocks], in place."""
        raise LayoutError(
            f"{type(self).__name__} has no pattern; use FixedSparsityConfig or another subclass, or Layout.from_mask"
        )


class RandomAndGlobal(SparsityConfig):
    """Base class with methods that several patterns use."""

    def set_random(self, rows: Tensor, count: int, causal: bool) -> None:
        """Set `count` random blocks per row. With `causal` they are chosen from the blocks up to the row; all of these
        if they are fewer.
        """
        blocks = rows.shape[0]
        for row in range(blocks):
            limit = row + 1 if causal else blocks
            rows[row, random.sample(range(0, limit), min(count, limit))] = 1

    def set_sliding(self, rows: Tensor, width: int, attention: str) -> None:
        """Set a band around the diagonal."""
        blocks, reach = rows.shape[0], width // 2
        for row in range(blocks):
            stop = min(row + reach + 1, blocks) if attention == "bidirectional" else row + 1
            rows[row, max(0, row - reach) : stop] = 1


def set_square(rows: Tensor, start: int, stop: int, attention: str) -> None:
    """Set the blocks from `start` to `stop` in both directions; unidirectional: up to the diagonal. In place."""
    for row in range(start, stop):
        rows[row, start : stop if attention == "bidirectional" else row + 1] = 1


def global_ranges(indices: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int]]:
    """[begin, end) of every global range. Raises `LayoutError` if the lists do not fit."""
    for index in indices:
        checked_int("global_block_indices", index, 0)
    if ends is None:
        return [(index, index + 1) for index in indices]
    if len(ends) != len(indices):
        raise LayoutError(
            f"got {len(indices)} global_block_indices and {len(ends)} global_block_end_indices, expected as many"
        )
    for start, stop in zip(indices, ends, strict=True):
        if start >= stop:
            raise LayoutError(f"got a global range from {start} to {stop} (exclusive), expected start < end")
    return list(zip(indices, ends, strict=True))
