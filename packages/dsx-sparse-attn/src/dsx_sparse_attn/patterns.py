"""Sparsity configs: rules that make a layout for any sequence length.

Names, parameters, defaults and the order of random draws are those of DeepSpeed's sparse attention, so that a script's
seed gives the same layout as there. Random blocks come from Python's global `random`: for each head with its own
layout, first the random blocks (rows from the top, one `random.sample` each), then the local blocks, then the global
blocks. With `different_layout_per_head=False` only head 0 is drawn, and the other heads are copies of it.

Parameters are checked when the config is made; checks that depend on the length are done in `make_layout`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .errors import LayoutError
from .pattern import RandomAndGlobal, SparsityConfig, checked_direction, checked_int, global_ranges, set_square

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparsityConfig",
    "VariableSparsityConfig",
]


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
        self.num_local_blocks = checked_int("num_local_blocks", num_local_blocks, 1)
        self.num_global_blocks = checked_int("num_global_blocks", num_global_blocks, 1)
        self.attention = checked_direction(attention)
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = checked_int(
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
            set_square(rows, start, min(start + window, blocks), self.attention)
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


class VariableSparsityConfig(RandomAndGlobal):
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
        self.num_random_blocks = checked_int("num_random_blocks", num_random_blocks, 0)
        self.local_window_blocks = [checked_int("local_window_blocks", n, 1) for n in local_window_blocks]
        if not self.local_window_blocks:
            raise LayoutError("got no local_window_blocks, expected at least one size, such as [4]")
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = None if global_block_end_indices is None else list(global_block_end_indices)
        self.ranges = global_ranges(self.global_block_indices, self.global_block_end_indices)
        self.attention = checked_direction(attention)
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
            set_square(rows, start, min(start + size, blocks), self.attention)
            start += size
        for first, stop in self.ranges:
            if first >= blocks:
                continue
            if self.horizontal_global_attention:
                rows[first : min(stop, blocks), :] = 1
            rows[0 if self.attention == "bidirectional" else first :, first : min(stop, blocks)] = 1


class BigBirdSparsityConfig(RandomAndGlobal):
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
        self.num_random_blocks = checked_int("num_random_blocks", num_random_blocks, 0)
        self.num_sliding_window_blocks = checked_int("num_sliding_window_blocks", num_sliding_window_blocks, 1)
        self.num_global_blocks = checked_int("num_global_blocks", num_global_blocks, 0)
        self.attention = checked_direction(attention)

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


class BSLongformerSparsityConfig(RandomAndGlobal):
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
        self.num_sliding_window_blocks = checked_int("num_sliding_window_blocks", num_sliding_window_blocks, 1)
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = None if global_block_end_indices is None else list(global_block_end_indices)
        self.ranges = global_ranges(self.global_block_indices, self.global_block_end_indices)
        self.attention = checked_direction(attention)

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


class LocalSlidingWindowSparsityConfig(RandomAndGlobal):
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
        self.num_sliding_window_blocks = checked_int("num_sliding_window_blocks", num_sliding_window_blocks, 1)
        self.attention = checked_direction(attention)

    def check_length(self, blocks: int) -> None:
        """Require at least as many blocks as the window has."""
        if blocks < self.num_sliding_window_blocks:
            raise LayoutError(
                f"got {blocks} blocks, expected at least num_sliding_window_blocks={self.num_sliding_window_blocks}"
            )

    def fill(self, rows: Tensor, head: int) -> None:
        """Set the band."""
        self.set_sliding(rows, self.num_sliding_window_blocks, self.attention)
