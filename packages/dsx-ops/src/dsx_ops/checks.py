"""Requirements of this package's functions on tensors; each failure is a `TensorError`, raised before anything is
written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import TensorError
from .spec import FLOATS, name_of

MASK32 = 0xFFFFFFFF
WITH_FLOAT64 = (*FLOATS, torch.float64)


def arithmetic_of(x: Tensor) -> torch.dtype:
    """The dtype that a function of `x` computes in: float64 for float64 (for gradient checks; plain torch operations
    serve), else float32.
    """
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def vector_dtypes(x: Tensor) -> tuple[torch.dtype, ...]:
    """Dtypes of weights and biases along x's last dimension: float64 only where x is, so that nothing is narrowed
    silently.
    """
    return WITH_FLOAT64 if x.dtype is torch.float64 else FLOATS


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """(rows, columns) of a tensor seen as a matrix along its last dimension."""
    cols = tensor.shape[-1] if tensor.dim() else 1
    return (tensor.numel() // cols if cols else 0), cols


def check(
    tensor: Tensor,
    role: str,
    *,
    dtypes: Sequence[torch.dtype] = FLOATS,
    shape: Sequence[int] | None = None,
    like: Tensor | None = None,
) -> None:
    """`tensor` must be dense, contiguous, of one of `dtypes`, of `shape`, and on the device of `like`."""
    if tensor.dtype not in dtypes:
        wanted = ", ".join(map(name_of, dtypes))
        raise TensorError(f"{role}: got {name_of(tensor.dtype)}, expected {wanted}; convert it with .to()")
    if tensor.layout is not torch.strided:
        raise TensorError(f"{role}: got a {tensor.layout} tensor, expected a dense one; pass .to_dense()")
    if not tensor.is_contiguous():
        raise TensorError(f"{role}: got strides {tuple(tensor.stride())}, expected contiguous; pass .contiguous()")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise TensorError(f"{role}: got shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if like is not None and tensor.device != like.device:
        raise TensorError(f"{role}: got a tensor on {tensor.device}, expected {like.device}")


def check_seed(seed: int, offset: int) -> None:
    """Seeds are taken modulo 2^32; an offset is an element index."""
    if offset < 0:
        raise TensorError(f"offset: got {offset}, expected an element index >= 0")
