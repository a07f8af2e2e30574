"""Lists of tensors in one buffer and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import TensorError


def flatten(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """One flat tensor [sum of numels] with the elements of all, row-major, in their order.

    All of one dtype and device; with `out` (flat, contiguous, of any float dtype) they are converted into it. Raises
    `TensorError`.
    """
    given = [t.detach() for t in tensors]
    total = sum(t.numel() for t in given)
    if out is None:
        if not given:
            raise TensorError(
                "flatten: got no tensors, expected at least one (or an `out` that names dtype and device)"
            )
        _same(given, "flatten")
        return torch.cat([t.reshape(-1) for t in given])
    if out.dim() != 1 or out.numel() != total or not out.is_contiguous():
        raise TensorError(f"out: got shape {tuple(out.shape)}, expected a contiguous [{total}]")
    for part, tensor in zip(out.detach().split([t.numel() for t in given]), given):
        part.copy_(tensor.reshape(-1))
    return out


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views into `flat` with the shapes of `like`, in their order. Raises `TensorError` when the sizes do not add
    up.
    """
    total = sum(t.numel() for t in like)
    if flat.dim() != 1 or flat.numel() != total:
        raise TensorError(
            f"flat: got shape {tuple(flat.shape)}, expected [{total}], the elements of {len(like)} tensors"
        )
    return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in like]), like)]


def cast_to_byte_tensor(tensors: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
    """The bytes of contiguous tensors as flat uint8 views. Raises `TensorError`."""
    if isinstance(tensors, Tensor):
        if not tensors.is_contiguous():
            raise TensorError(f"got strides {tuple(tensors.stride())}, expected contiguous; pass .contiguous()")
        return tensors.detach().view(-1).view(torch.uint8)
    return [t for tensor in tensors for t in [cast_to_byte_tensor(tensor)] if isinstance(t, Tensor)]


def _same(tensors: Sequence[Tensor], what: str) -> None:
    first = tensors[0]
    for i, t in enumerate(tensors):
        if t.dtype != first.dtype or t.device != first.device:
            raise TensorError(
                f"{what}: tensor {i} is {t.dtype} on {t.device}, the first {first.dtype} on {first.device}; "
                "expected one dtype and device, or an `out` to convert into"
            )
