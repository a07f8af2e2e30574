"""Layouts: which blocks of the score matrix are computed.

A `Layout` is an int64 tensor [heads, blocks, blocks] of zeros and ones (row: block of queries, column: block of keys)
that knows its block size and density and can draw itself. Operations on it give plain tensors. Every function that
takes a layout also takes a plain tensor of that shape; then the block size is computed from the sequence length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import LayoutError
from .plot import write_picture

__all__ = ["BLOCKS", "Layout"]

BLOCKS = (16, 32, 64, 128)


class Layout(Tensor):
    """int64 [heads, blocks, blocks], 1 where a block is computed. Made by the sparsity configs or `from_mask`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors
    block: int
    _blocks: Tensor  # a plain tensor over the same memory; torch.compile cannot make it from the subclass

    @staticmethod
    def __new__(cls, blocks: Tensor, block: int) -> Layout:
        """Wrap [heads, blocks, blocks]; see `from_mask` for checks."""
        made: Any = torch.Tensor._make_subclass(cls, blocks)
        made.block = block
        made._blocks = blocks
        return made

    @classmethod
    def from_mask(cls, mask: Tensor, block: int, *, heads: int | None = None) -> Layout:
        """A layout from any block mask.

        Args:
            mask: [blocks, blocks] or [heads, blocks, blocks]; bool, or numbers, where nonzero means computed.
            block: positions per block.
            heads: repeat a mask of one head for this many heads.

        Raises:
            LayoutError: the mask is not square, or the heads do not match.
        """
        if mask.dim() == 2:
            mask = mask.unsqueeze(0)
        if mask.dim() != 3 or mask.shape[1] != mask.shape[2] or mask.shape[1] == 0:
            raise LayoutError(
                f"got a block mask of shape {tuple(mask.shape)}, expected [blocks, blocks] or [heads, blocks, blocks]"
            )
        if heads is not None and mask.shape[0] not in (1, heads):
            raise LayoutError(f"got a block mask of {mask.shape[0]} heads for {heads} heads; give one head or {heads}")
        if not isinstance(block, int) or block < 1:
            raise LayoutError(f"got block={block!r}, expected a positive int, such as one of {BLOCKS}")
        ones = (mask != 0).to(torch.int64)
        return cls(ones.expand(heads or mask.shape[0], -1, -1).contiguous(), block)

    @property
    def seq_len(self) -> int:
        """The number of positions that the layout covers."""
        return self.shape[-1] * self.block

    @property
    def density(self) -> float:
        """Share of the blocks that are computed, over all heads."""
        return self.plain().sum().item() / self.numel()

    def plain(self) -> Tensor:
        """The same memory as a plain tensor."""
        return self._blocks

    def per_head(self) -> list[float]:
        """Density of each head."""
        return [head.sum().item() / head.numel() for head in self.plain()]

    def plot(self, path: str | Path, *, heads: int | None = None, cell: int | None = None) -> Path:
        """Draw the heads side by side into a PNG or SVG file (by the file's suffix) and return its path.

        Heads with the same pattern are drawn once. `heads`: at most this many; `cell`: pixels per block.
        """
        return write_picture(self.plain(), self.block, Path(path), heads, cell)

    def _repr_svg_(self) -> str:
        """The picture that notebooks show."""
        from .plot import svg  # lazy import: only notebooks ask

        return svg(self.plain(), self.block)

    def __repr__(self) -> str:  # type: ignore[override]
        heads, blocks, _ = self.shape
        return f"Layout(heads={heads}, blocks={blocks}, block={self.block}, density={self.density:.4f})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Layout, (self.plain(), self.block)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return Layout(self.plain().clone(), self.block)
