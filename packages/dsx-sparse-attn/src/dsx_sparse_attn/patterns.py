"""Sparsity configs: rules that make a layout for any sequence length.

Names, parameters, defaults and the order of random draws are those of DeepSpeed's sparse attention, so that a script's
seed gives the same layout as there. Random blocks come from Python's global `random`: for each head with its own
layout, first the random blocks (rows from the top, one `random.sample` each), then the local blocks, then the global
blocks. With `different_layout_per_head=False` only head 0 is drawn, and the other heads are copies of it.

Parameters are checked when the config is made; checks that depend on the length are done in `make_layout`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import LayoutError
from .layout import Layout

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparsityConfig",
    "VariableSparsityConfig",
]

_DIRECTIONS = ("unidirectional", "bidirectional")


def _checked_int(name: str, value: int, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LayoutError(f"got {name}={value!r}, expected an int >= {least}")
    return value


def _checked_direction(value: str) -> str:
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
        self.num_heads = _checked_int("num_heads", num_heads, 1)
        self.block = _checked_int("block", block, 1)
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


class DenseSparsityConfig(SparsityConfig):
    """All blocks: dense attention with the same interface, for comparison."""

    def fill(self, rows: Tensor, head: int) -> None:
        """Set all blocks."""
        rows.fill_(1)


class FixedSparsityConfig(SparsityConfig):
    """Local windows; all windows see the last blocks of each window (Child et al. 2019, "fixed")."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        """
        Args:
            num_heads, block, different_layout_per_head: as in `SparsityConfig`.
            num_local_blocks: blocks per window.
            num_global_blocks: blocks of each window that all others see; must divide the window.
            attention: "unidirectional": a block sees no later block.
            horizontal_global_attention: those blocks also see everything; needs "bidirectional".
            num_different_global_patterns: after so many heads the choice of those blocks begins again.

        Raises:
            LayoutError: a combination of values has no meaning.
        """
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_local_blocks = _checked_int("num_local_blocks", num_local_blocks, 1)
        self.num_global_blocks = _checked_int("num_global_blocks", num_global_blocks, 1)
        self.attention = _checked_direction(attention)
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = _checked_int(
            "num_different_global_patterns", num_different_global_patterns, 1
        )
        if num_local_blocks % num_global_blocks != 0:
            raise LayoutError(
                f"got num_local_blocks={num_local_blocks} and num_global_blocks={num_global_blocks}, "
                "expected the first to be a multiple of the second"
            )
        if horizontal_global_attention and attention != "bidirectional":
            raise LayoutError('horizontal_global_attention=True needs attention="bidirectional"')
        if num_different_global_patterns > 1 and not different_layout_per_head:
            raise LayoutError(
                f"num_different_global_patterns={num_different_global_patterns} needs different_layout_per_head=True"
            )
        most = num_local_blocks // num_global_blocks
        if num_different_global_patterns > most:
            raise LayoutError(
                f"got num_different_global_patterns={num_different_global_patterns}, expected at most {most} "
                f"(num_local_blocks / num_global_blocks)"
            )

    def fill(self, rows: Tensor, head: int) -> None:
        """Set the windows, then their global blocks."""
        blocks, window = rows.shape[0], self.num_local_blocks
        for start in range(0, blocks, window):
            _set_square(rows, start, min(start + window, blocks), self.attention)
        first = window - (1 + head % self.num_different_global_patterns) * self.num_global_blocks
        end = blocks - blocks % window
        for start in range(first, end, window):
            self._set_global(rows, start)
        if blocks % window != 0:  # the last window is short
            self._set_global(rows, min(end + first, blocks - self.num_global_blocks))

    def _set_global(self, rows: Tensor, start: int) -> None:
        start = max(start, 0)
        stop = start + self.num_global_blocks
        rows[0 if self.attention == "bidirectional" else start :, start:stop] = 1
        if self.horizontal_global_attention:
            rows[start:stop, :] = 1


class _RandomAndGlobal(SparsityConfig):
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


def _set_square(rows: Tensor, start: int, stop: int, attention: str) -> None:
    for row in range(start, stop):
        rows[row, start : stop if attention == "bidirectional" else row + 1] = 1


def _global_ranges(indices: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int]]:
    """[begin, end) of every global range. Raises `LayoutError` if the lists do not fit."""
    for index in indices:
        _checked_int("global_block_indices", index, 0)
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


class VariableSparsityConfig(_RandomAndGlobal):
    """Windows of given sizes, given global blocks, and random ones."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
    ) -> None:
        """
        Args:
            num_heads, block, different_layout_per_head: as in `SparsityConfig`.
            num_random_blocks: random blocks per row (also later ones in "unidirectional").
            local_window_blocks: sizes of the windows; the last size is repeated to the end.
            global_block_indices: blocks that all blocks see; with `global_block_end_indices`, starts of ranges.
            global_block_end_indices: the exclusive ends of these ranges.
            attention: "unidirectional": a block sees no later block in windows and global columns.
            horizontal_global_attention: global blocks also see everything; needs "bidirectional".

        Raises:
            LayoutError: a combination of values has no meaning.
        """
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_random_blocks = _checked_int("num_random_blocks", num_random_blocks, 0)
        self.local_window_blocks = [_checked_int("local_window_blocks", n, 1) for n in local_window_blocks]
        if not self.local_window_blocks:
            raise LayoutError("got no local_window_blocks, expected at least one size, such as [4]")
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = None if global_block_end_indices is None else list(global_block_end_indices)
        self.ranges = _global_ranges(self.global_block_indices, self.global_block_end_indices)
        self.attention = _checked_direction(attention)
        self.horizontal_global_attention = horizontal_global_attention
        if horizontal_global_attention and attention != "bidirectional":
            raise LayoutError('horizontal_global_attention=True needs attention="bidirectional"')

    def check_length(self, blocks: int) -> None:
        """Require at least as many blocks as random ones."""
        if blocks < self.num_random_blocks:
            raise LayoutError(f"got {blocks} blocks, expected at least num_random_blocks={self.num_random_blocks}")

    def fill(self, rows: Tensor, head: int) -> None:
        """Set random blocks, then windows, then global blocks."""
        blocks = rows.shape[0]
        if self.num_random_blocks:
            self.set_random(rows, self.num_random_blocks, causal=False)
        start, sizes = 0, list(self.local_window_blocks)
        while start < blocks:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            _set_square(rows, start, min(start + size, blocks), self.attention)
            start += size
        for first, stop in self.ranges:
            if first >= blocks:
                continue
            if self.horizontal_global_attention:
                rows[first : min(stop, blocks), :] = 1
            rows[0 if self.attention == "bidirectional" else first :, first : min(stop, blocks)] = 1


class BigBirdSparsityConfig(_RandomAndGlobal):
    """Random, sliding and global blocks (Zaheer et al. 2020, ITC)."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
    ) -> None:
        """
        Args:
            num_heads, block, different_layout_per_head: as in `SparsityConfig`.
            num_random_blocks: random blocks per row; "unidirectional": chosen from the blocks up to the row, or all of
                these if they are fewer.
            num_sliding_window_blocks: width of the band around the diagonal.
            num_global_blocks: so many first blocks see all blocks, and all blocks see them.
            attention: "unidirectional" keeps only the lower triangle.

        Raises:
            LayoutError: a number is out of range.
        """
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_random_blocks = _checked_int("num_random_blocks", num_random_blocks, 0)
        self.num_sliding_window_blocks = _checked_int("num_sliding_window_blocks", num_sliding_window_blocks, 1)
        self.num_global_blocks = _checked_int("num_global_blocks", num_global_blocks, 0)
        self.attention = _checked_direction(attention)

    def check_length(self, blocks: int) -> None:
        """Require at least as many blocks as each kind needs."""
        for name in ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"):
            if blocks < getattr(self, name):
                raise LayoutError(
                    f"got {blocks} blocks, expected at least {name}={getattr(self, name)}; use a longer sequence or "
                    "smaller blocks"
                )

    def fill(self, rows: Tensor, head: int) -> None:
        """Set random, sliding and global blocks; then keep the lower triangle if "unidirectional"."""
        causal = self.attention == "unidirectional"
        if self.num_random_blocks:
            self.set_random(rows, self.num_random_blocks, causal)
        self.set_sliding(rows, self.num_sliding_window_blocks, "bidirectional")
        rows[: self.num_global_blocks, :] = 1
        rows[:, : self.num_global_blocks] = 1
        if causal:
            rows.tril_()


class BSLongformerSparsityConfig(_RandomAndGlobal):
    """A sliding window and given global blocks (Beltagy et al. 2020, in blocks)."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
    ) -> None:
        """
        Args:
            num_heads, block, different_layout_per_head: as in `SparsityConfig`.
            num_sliding_window_blocks: width of the band around the diagonal.
            global_block_indices: blocks that see all blocks and that all blocks see; with ends, starts of ranges.
            global_block_end_indices: the exclusive ends of these ranges.
            attention: "unidirectional" keeps only the lower triangle.

        Raises:
            LayoutError: a combination of values has no meaning.
        """
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_sliding_window_blocks = _checked_int("num_sliding_window_blocks", num_sliding_window_blocks, 1)
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = None if global_block_end_indices is None else list(global_block_end_indices)
        self.ranges = _global_ranges(self.global_block_indices, self.global_block_end_indices)
        self.attention = _checked_direction(attention)

    def check_length(self, blocks: int) -> None:
        """Require at least as many blocks as the window has."""
        if blocks < self.num_sliding_window_blocks:
            raise LayoutError(
                f"got {blocks} blocks, expected at least num_sliding_window_blocks={self.num_sliding_window_blocks}"
            )

    def fill(self, rows: Tensor, head: int) -> None:
        """Set sliding and global blocks; then keep the lower triangle if "unidirectional"."""
        self.set_sliding(rows, self.num_sliding_window_blocks, "bidirectional")
        for first, stop in self.ranges:
            rows[first : min(stop, rows.shape[0]), :] = 1
            rows[:, first : min(stop, rows.shape[0])] = 1
        if self.attention == "unidirectional":
            rows.tril_()


class LocalSlidingWindowSparsityConfig(_RandomAndGlobal):
    """A sliding window only."""

    def __init__(
        self, num_heads: int, block: int = 16, num_sliding_window_blocks: int = 3, attention: str = "unidirectional"
    ) -> None:
        """
        Args:
            num_heads, block: as in `SparsityConfig`.
            num_sliding_window_blocks: width of the band around the diagonal.
            attention: "unidirectional": a block sees no later block.

        Raises:
            LayoutError: a number is out of range.
        """
        super().__init__(num_heads, block)
        self.num_sliding_window_blocks = _checked_int("num_sliding_window_blocks", num_sliding_window_blocks, 1)
        self.attention = _checked_direction(attention)

    def check_length(self, blocks: int) -> None:
        """Require at least as many blocks as the window has."""
        if blocks < self.num_sliding_window_blocks:
            raise LayoutError(
                f"got {blocks} blocks, expected at least num_sliding_window_blocks={self.num_sliding_window_blocks}"
            )

    def fill(self, rows: Tensor, head: int) -> None:
        """Set the band."""
        self.set_sliding(rows, self.num_sliding_window_blocks, self.attention)
