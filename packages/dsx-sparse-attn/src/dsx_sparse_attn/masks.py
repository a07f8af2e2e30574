"""Masks and biases as numbers that are added to scores, and the rule that very low numbers hide a key.

A mask hides a key from a query where it is False, where it is 0 in mode "mul", or where the number added to the score
is lower than `HIDES_BELOW`. The last case covers -inf and the lowest finite number of float32 and bfloat16, which
Hugging Face models add to hide keys (`torch.finfo(dtype).min`). In a float16 mask its own lowest number, -65504, hides.
A query from which all keys are hidden gives zeros and passes no gradient. Without this rule its result would be the
mean of values that it may not see. The kernels compute in powers of two: multiplied by log2(e), a number below the
limit is -inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .errors import ArgumentError

__all__ = ["HIDES_BELOW", "additive", "check_mask", "hide"]

HIDES_BELOW = torch.finfo(torch.float32).min * math.log(2.0)  # -2.36e38


def check_mask(name: str, mask: Tensor, mode: str) -> None:
    """Raise `ArgumentError` for an unknown mode, or for an integer mask, which "add" would add as numbers."""
    if mode not in ("add", "mul"):
        raise ArgumentError(f'got {name}_mode={mode!r}, expected "add" or "mul"')
    if mode == "add" and not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ArgumentError(
            f'got a {name} of {mask.dtype} with {name}_mode="add", which would add its numbers to the scores and hide '
            f'nothing; pass {name}.bool() (True is seen), or {name}_mode="mul" (0 hides), or floats to add'
        )


def additive(mask: Tensor, mode: str, dtype: torch.dtype) -> Tensor:
    """A checked mask as numbers to add to scores, in `dtype`."""
    if mask.dtype == torch.bool or mode == "mul":
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask == 0, float("-inf"))
    if mask.dtype == torch.float16:
        return mask.to(dtype).masked_fill(mask <= torch.finfo(torch.float16).min, float("-inf"))
    return mask.to(dtype)


def hide(added: Tensor) -> Tensor:
    """Replace numbers below `HIDES_BELOW` by -inf. `added` is the sum of everything that is added to a score."""
    return added.masked_fill(added < HIDES_BELOW, float("-inf"))
