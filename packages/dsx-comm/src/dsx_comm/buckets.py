"""Tensors in buckets: consecutive ones that together have at most so many elements.

A bucket is what a loop over many tensors handles at a time: one message, or the temporaries of one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

__all__ = ["in_buckets"]

_T = TypeVar("_T", bound=torch.Tensor)


def in_buckets(tensors: Iterable[_T], numel: int) -> Iterator[list[_T]]:
    """Divide tensors into lists, in order, each of at most `numel` elements; a larger tensor is alone in its list."""
    bucket: list[_T] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > numel:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
