"""The order of elements in memory: when kernels may walk through tensors as if they were flat, and what to do when not.

A kernel gets an address and a number of elements. Tensors of one shape and equal strides that fill their memory without
holes ("dense": contiguous, channels_last, transposed) have equal elements at equal places, so an elementwise kernel
takes them as they are. For all others a working copy in the right order stands in, and is put back after the call where
the kernel wrote.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import TensorError


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in whatever order of dimensions, each of them once."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, n) for n, st in zip(tensor.shape, tensor.stride()) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one shape have equal elements at equal places."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    strides = zip(a.shape, a.stride(), b.stride())
    return a.shape == b.shape and all(s == t for n, s, t in strides if n != 1)


def flat(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, as a view [numel]."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def without_expanded(tensor: Tensor) -> Tensor:
    """A view with one element for each that `expand` repeats."""
    for d, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(d, 0, 1)
    return tensor


def may_overlap(tensor: Tensor) -> bool:
    """Whether two elements may share memory; True also for exotic strides that the rule below cannot decide."""
    reach = 0
    for stride, size in sorted((st, n) for n, st in zip(tensor.shape, tensor.stride()) if n != 1):
        if stride <= reach:
            return tensor.numel() > 1
        reach += stride * (size - 1)
    return False


@dataclass(frozen=True)
class WorkingCopy:
    """`work` stands in for `target`, or for its elements at `index` (as torch's indexing takes it)."""

    target: Tensor
    work: Tensor
    index: tuple[Tensor, ...] | None = None

    def put_back(self) -> None:
        """Write what the kernel left in `work` into `target`."""
        if self.index is None:
            self.target.copy_(self.work)
        else:
            self.target.index_put_(self.index, self.work)


def put_back(copies: Iterable[WorkingCopy]) -> None:
    """All of them, in their order."""
    with torch.no_grad():
        for copy in copies:
            copy.put_back()


def readable(tensor: Tensor) -> Tensor:
    """A dense tensor with the elements of `tensor`: itself, the values of a sparse one, or a copy."""
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values().contiguous()
    return tensor if is_dense(tensor) else tensor.contiguous()


def writable(tensor: Tensor, role: str) -> tuple[Tensor, list[WorkingCopy]]:
    """A dense tensor to be multiplied in place of `tensor`, and what to put back then. Raises `TensorError`.

    Of elements that `expand` repeats there is one in it. A sparse tensor gives its values as they are: those of equal
    indices are added up later, which multiplication does not mind.
    """
    plain = tensor._values() if tensor.layout is torch.sparse_coo else without_expanded(tensor)
    if is_dense(plain):
        return plain, []
    if may_overlap(plain):
        raise TensorError(f"{role}: elements share memory (strides {tuple(tensor.stride())}); pass .contiguous()")
    work = plain.contiguous()
    return work, [WorkingCopy(plain, work)]
