"""`deepspeed.runtime.sparse_tensor.SparseTensor`: rows of a matrix, by their numbers."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SparseTensor"]


class SparseTensor:
    """Some rows of a matrix whose other rows are 0.

    Args:
        dense_tensor: a `torch.sparse_coo` gradient with one sparse dimension; None: an empty object whose attributes
            the caller sets.

    Attributes:
        orig_dense_tensor: the given tensor.
        indices: int64 [n], numbers of the rows. A row may occur several times; then its values are added up.
        values: [n, columns].
        dense_size: [rows, columns].

    Raises:
        ValueError: the tensor is not sparse, or has another number of dimensions.
    """

    def __init__(self, dense_tensor: Tensor | None = None) -> None:
        self.orig_dense_tensor = dense_tensor
        self.indices: Tensor | None = None
        self.values: Tensor | None = None
        self.dense_size: list[int] | None = None
        if dense_tensor is None:
            return
        if not dense_tensor.is_sparse or dense_tensor.sparse_dim() != 1 or dense_tensor.dim() != 2:
            raise ValueError(
                f"SparseTensor: got a {dense_tensor.layout} tensor of shape {tuple(dense_tensor.shape)}, expected the"
                " sparse gradient of an embedding: torch.sparse_coo with one sparse dimension"
            )
        self.is_sparse, self.dtype = True, dense_tensor.dtype
        rows = dense_tensor.coalesce()
        self.indices, self.values = rows.indices().flatten(), rows.values()
        self.dense_size = list(dense_tensor.size())

    def to_coo_tensor(self) -> Tensor:
        """The rows as a `torch.sparse_coo` tensor."""
        indices, values, size = self._filled()
        return torch.sparse_coo_tensor(indices.unsqueeze(0), values, size)

    def to_dense(self) -> Tensor:
        """The whole matrix."""
        return self.to_coo_tensor().to_dense()

    @staticmethod
    def type() -> str:
        """DeepSpeed's word for this class."""
        return "deepspeed.SparseTensor"

    def sparse_size(self) -> tuple[int, int]:
        """(numbers that are kept, numbers of the whole matrix)."""
        indices, values, size = self._filled()
        return indices.numel() + values.numel(), size[0] * size[1]

    def add(self, b: SparseTensor) -> None:
        """Add another one of the same size, in place.

        Raises:
            ValueError: the sizes differ.
        """
        (indices, values, size), (other_indices, other_values, other_size) = self._filled(), b._filled()
        if size != other_size:
            raise ValueError(f"SparseTensor.add: got the size {other_size}, expected {size}")
        self.indices, self.values = torch.cat([indices, other_indices]), torch.cat([values, other_values])

    def _filled(self) -> tuple[Tensor, Tensor, list[int]]:
        if self.indices is None or self.values is None or self.dense_size is None:
            raise ValueError("SparseTensor: got an empty one; set indices, values and dense_size, or give a tensor")
        return self.indices, self.values, list(self.dense_size)

    def __repr__(self) -> str:
        if self.indices is None:
            return "DeepSpeed.SparseTensor()"
        return f"DeepSpeed.SparseTensor(rows={self.indices.numel()}, dense_size={self.dense_size})"
