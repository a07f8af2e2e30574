"""Block-sparse matrix products and softmax: `MatMul` and `Softmax`, the parts of attention.

A block-sparse tensor is [batch, nnz, block, block]: the computed blocks of all heads in the order of
`layout.nonzero()`. This is plain PyTorch (gather, batched product, scatter-add), so everything can be differentiated,
also twice, on any device. For attention use `block_sparse_attention`, which never makes these tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ArgumentError, LayoutError
from .layout import Layout
from .masks import additive, check_mask, hide

__all__ = ["MatMul", "Softmax"]


def _plain(layout: Tensor) -> Tensor:
    layout = layout.plain() if isinstance(layout, Layout) else layout
    if layout.dim() != 3:
        raise LayoutError(f"got a layout of shape {tuple(layout.shape)}, expected [heads, block rows, block columns]")
    return layout


def _refuse_bench(bench: bool) -> None:
    if bench:
        raise ArgumentError(
            "got bench=True, expected False: the operator does not time itself; use torch.utils.benchmark.Timer"
        )


class _BlockOperator:
    """An operator over the blocks of a layout. It keeps their indices on every device that it was used on."""

    def __init__(self, layout: Tensor, block: int) -> None:
        layout = _plain(layout)
        if block < 1:
            raise LayoutError(f"got block={block}, expected a positive int")
        self.block = block
        self.heads, self.block_rows, self.block_cols = layout.shape
        self._lists = {layout.device: layout.nonzero(as_tuple=True)}
        self.nnz = self._lists[layout.device][0].numel()

    def lists(self, device: torch.device) -> tuple[Tensor, ...]:
        """Head, block row and block column of every block, each int64 [nnz]."""
        if device not in self._lists:
            self._lists[device] = tuple(x.to(device) for x in next(iter(self._lists.values())))
        return self._lists[device]

    def check_sparse(self, name: str, x: Tensor) -> None:
        """Raise `ArgumentError` unless `x` is [batch, nnz, block, block]."""
        if x.dim() != 4 or x.shape[1:] != (self.nnz, self.block, self.block):
            raise ArgumentError(
                f"got {name} of shape {tuple(x.shape)}, expected [batch, {self.nnz}, {self.block}, {self.block}] "
                "(the blocks of this layout)"
            )


class MatMul(_BlockOperator):
    """Products in which one matrix has the layout's sparsity.

    * "sdd": dense [b, h, m, k] x dense [b, h, k, n] -> only the layout's blocks of [m, n];
    * "dsd": sparse [m, k] x dense [b, h, k, n] -> dense [b, h, m, n];
    * "dds": dense [b, h, m, k] x sparse [k, n] -> dense [b, h, m, n].

    `trans_a`, `trans_b` multiply by the transpose of the given matrix (the layout is that of the given matrix).
    """

    def __init__(
        self,
        layout: Tensor,
        block: int,
        mode: str,
        trans_a: bool = False,
        trans_b: bool = False,
        bench: bool = False,
    ) -> None:
        """
        Args:
            layout: [heads, block rows, block columns] of the sparse matrix.
            block: its block size.
            mode: "sdd", "dsd" or "dds".
            trans_a: multiply by the transpose of the first matrix.
            trans_b: multiply by the transpose of the second matrix.
            bench: must be False; existing scripts pass it. In DeepSpeed, True timed every call.

        Raises:
            LayoutError: the layout has another number of dimensions.
            ArgumentError: another mode, or bench=True.
        """
        _refuse_bench(bench)
        super().__init__(layout, block)
        if mode not in ("sdd", "dsd", "dds"):
            raise ArgumentError(f'got mode={mode!r}, expected "sdd", "dsd" or "dds"')
        self.mode, self.trans_a, self.trans_b = mode, trans_a, trans_b

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """The product. Raises `ArgumentError` when a shape does not fit the layout."""
        if self.mode == "sdd":
            return self._sdd(a.transpose(-1, -2) if self.trans_a else a, b.transpose(-1, -2) if self.trans_b else b)
        if self.mode == "dsd":
            return self._sparse_dense(a, b.transpose(-1, -2) if self.trans_b else b, self.trans_a)
        # (A S)^T = S^T A^T
        dense = a if self.trans_a else a.transpose(-1, -2)
        return self._sparse_dense(b, dense, not self.trans_b, first="b").transpose(-1, -2)

    def _split(self, name: str, x: Tensor, blocks: int) -> Tensor:
        """[b, h, blocks * block, n] -> [b, h, blocks, block, n]."""
        if x.dim() != 4 or x.shape[1] != self.heads or x.shape[2] != blocks * self.block:
            raise ArgumentError(
                f"{self.mode}: got {name} of shape {tuple(x.shape)} (after transposition), expected "
                f"[batch, {self.heads}, {blocks * self.block}, n]"
            )
        return x.reshape(x.shape[0], self.heads, blocks, self.block, x.shape[3])

    def _sdd(self, a: Tensor, b: Tensor) -> Tensor:
        heads, rows, cols = self.lists(a.device)
        left = self._split("a", a, self.block_rows)
        right = self._split("b", b.transpose(-1, -2), self.block_cols)
        if left.shape[-1] != right.shape[-1]:
            raise ArgumentError(f"sdd: got inner sizes {left.shape[-1]} and {right.shape[-1]}, expected them equal")
        return left[:, heads, rows] @ right[:, heads, cols].transpose(-1, -2)

    def _sparse_dense(self, sparse: Tensor, dense: Tensor, transposed: bool, first: str = "a") -> Tensor:
        self.check_sparse(first, sparse)
        heads, rows, cols = self.lists(sparse.device)
        out_blocks, in_blocks = (self.block_cols, self.block_rows) if transposed else (self.block_rows, self.block_cols)
        to, source = (cols, rows) if transposed else (rows, cols)
        blocks = sparse.transpose(-1, -2) if transposed else sparse
        product = blocks @ self._split("b" if first == "a" else "a", dense, in_blocks)[:, heads, source]
        batch, columns = product.shape[0], product.shape[-1]
        total = product.new_zeros(batch, self.heads * out_blocks, self.block, columns)
        total = total.index_add(1, heads * out_blocks + to, product)
        return total.view(batch, self.heads, out_blocks * self.block, columns)


class Softmax(_BlockOperator):
    """Softmax over the computed blocks of every row of a block-sparse tensor. Rows without an allowed element are 0.

    The result is a new tensor. DeepSpeed's operator writes the result into `x` and returns `x`, so a script must use
    the returned tensor. Working in place would prevent second derivatives, and autograd refuses it for a leaf that
    requires a gradient.
    """

    def __init__(self, layout: Tensor, block: int, bench: bool = False) -> None:
        """Arguments as those of `MatMul`, which raises the same errors."""
        _refuse_bench(bench)
        super().__init__(layout, block)

    def __call__(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
    ) -> Tensor:
        """softmax(x * scale + rpe + masks), block-sparse like x, which is not changed.

        Args:
            x: [batch, nnz, block, block].
            rpe: [heads, rows, columns] or with a batch in front (1 or batch); gets a gradient.
            key_padding_mask: [batch, columns]; attn_mask: [rows, columns]. "add" (the default of both in this operator,
                as scripts expect) adds floats, "mul" hides where a mask is 0. Bool: as in `block_sparse_attention`.

        Raises:
            ArgumentError: a shape or mode does not fit, or a mask's numbers do not fit its mode.
        """
        self.check_sparse("x", x)
        heads, rows, cols = self.lists(x.device)
        added: list[Tensor] = []
        if rpe is not None:
            added.append(self._blocks_of("rpe", rpe if rpe.dim() == 4 else rpe.unsqueeze(0))[:, heads, rows, cols])
        if key_padding_mask is not None:
            check_mask("key_padding_mask", key_padding_mask, key_padding_mask_mode)
            expected = (x.shape[0], self.block_cols * self.block)
            if key_padding_mask.shape != expected:
                got = tuple(key_padding_mask.shape)
                raise ArgumentError(f"got a key_padding_mask of shape {got}, expected {expected}")
            added.append(self._key_bias(key_padding_mask, key_padding_mask_mode, x.dtype)[:, cols].unsqueeze(-2))
        if attn_mask is not None:
            check_mask("attn_mask", attn_mask, attn_mask_mode)
            bias = additive(attn_mask, attn_mask_mode, x.dtype)
            bias = bias.expand(1, self.heads, *bias.shape[-2:])
            added.append(self._blocks_of("attn_mask", bias)[:, heads, rows, cols])
        s = x * scale
        if added:
            s = s + hide(sum(added[1:], start=added[0]))
        return self._normalised(s, heads * self.block_rows + rows)

    def _normalised(self, s: Tensor, lines: Tensor) -> Tensor:
        per_block = s.detach().amax(-1)
        top = s.new_full((s.shape[0], self.heads * self.block_rows, self.block), float("-inf"))
        top = top.scatter_reduce(1, lines.view(1, -1, 1).expand_as(per_block), per_block, "amax")
        top = top.masked_fill(top == float("-inf"), 0.0)
        p = torch.exp(s - top[:, lines].unsqueeze(-1))
        total = torch.zeros_like(top).index_add(1, lines, p.sum(-1))
        return p / torch.where(total == 0, 1.0, total)[:, lines].unsqueeze(-1)

    def _blocks_of(self, name: str, x: Tensor) -> Tensor:
        """[b, heads, rows, columns] -> [b, heads, block rows, block columns, block, block]."""
        n = self.block
        if x.shape[1:] != (self.heads, self.block_rows * n, self.block_cols * n):
            raise ArgumentError(
                f"got {name} of shape {tuple(x.shape)}, expected {self.heads} heads of {self.block_rows * n} x "
                f"{self.block_cols * n}"
            )
        return x.reshape(x.shape[0], self.heads, self.block_rows, n, self.block_cols, n).transpose(3, 4)

    def _key_bias(self, mask: Tensor, mode: str, dtype: torch.dtype) -> Tensor:
        return additive(mask, mode, dtype, true_hides=True).reshape(mask.shape[0], self.block_cols, self.block)
