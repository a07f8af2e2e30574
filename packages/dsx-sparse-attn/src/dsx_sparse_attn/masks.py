"""Masks and biases as numbers that are added to scores, and the rule that very low numbers hide a key.

A bool mask has the meaning that torch gives to an argument of its name: True in a `key_padding_mask` hides a key (as in
`torch.nn.MultiheadAttention`), True in an `attn_mask` shows it (as in `scaled_dot_product_attention`). Numbers hide
where they are 0 in mode "mul", and where the number added to the score is lower than `HIDES_BELOW`. The last case
covers -inf and the lowest finite number of float32 and bfloat16, which Hugging Face models add to hide keys
(`torch.finfo(dtype).min`). In a float16 mask its own lowest number, -65504, hides. A query from which all keys are
hidden gives zeros and passes no gradient. Without this rule its result would be the mean of values that it may not see.
The kernels compute in powers of two: multiplied by log2(e), a number below the limit is -inf.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .cache import derived
from .errors import ArgumentError

__all__ = ["HIDES_BELOW", "additive", "check_mask", "hide"]

HIDES_BELOW = torch.finfo(torch.float32).min * math.log(2.0)  # -2.36e38


def check_mask(name: str, mask: Tensor, mode: str) -> None:
    """Refuse a mask whose numbers would not hide what their writer means.

    Args:
        name: "key_padding_mask" or "attn_mask", which decides the meaning of True.

    Raises:
        ArgumentError: an unknown mode; integers, or floats that are all 0 or 1, to be added; negative numbers of which
            0 would hide; a bool `key_padding_mask` in mode "mul".
    """
    if mode not in ("add", "mul"):
        raise ArgumentError(f'got {name}_mode={mode!r}, expected "add" or "mul"')
    keys = name == "key_padding_mask"
    if mask.dtype == torch.bool:
        if keys and mode == "mul":
            raise ArgumentError(
                f'got a bool {name} with {name}_mode="mul", where 0 hides; as in torch, True in a bool {name} hides;'
                f' pass {name}.float() for "mul", or the bool mask with {name}_mode="add"'
            )
        return
    if mode == "mul":
        if _facts(mask).negative:
            raise ArgumentError(
                f'got a {name} with negative numbers and {name}_mode="mul", where 0 hides and all other numbers show;'
                f' pass {name}_mode="add" to add them to the scores'
            )
        return
    kind = f"a {name} of {mask.dtype}"
    if mask.is_floating_point():
        if not _facts(mask).zeros_and_ones:
            return
        kind = f"a {name} of floats that are all 0 or 1"
    fix = f"pass {name} == 0 (True hides)" if keys else f"pass {name}.bool() (True is seen)"
    raise ArgumentError(
        f'got {kind} with {name}_mode="add", which would add its numbers to the scores and hide nothing; {fix}, or'
        f' {name}_mode="mul" (0 hides), or floats to add'
    )


class _Facts(NamedTuple):
    """Properties of the values of a mask, from which its meaning is judged."""

    negative: bool
    zeros_and_ones: bool
    """No other numbers, and at least one 1: zeros alone are an added mask that hides nothing."""


def _facts(mask: Tensor) -> _Facts:
    """Facts about the values; all False where they cannot be read: while a call is compiled or captured.

    The host waits for the device once per mask: the result is kept as long as the mask lives and nothing is written to
    it. Layers get views of one mask, so it is kept with the tensor that owns the memory.
    """
    traced = torch.compiler.is_compiling() or type(mask) not in (Tensor, torch.nn.Parameter) or mask.is_meta
    if traced or not mask.numel() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _Facts(False, False)
    place = ("facts", mask.storage_offset(), mask.shape, mask.stride(), mask.dtype)
    return derived(mask if mask._base is None else mask._base, place, lambda: _read(mask))


def _read(mask: Tensor) -> _Facts:
    ones = mask == 1
    facts = torch.stack([(mask < 0).any(), ((mask == 0) | ones).all(), ones.any()]).tolist()
    return _Facts(facts[0], facts[1] and facts[2])


def additive(mask: Tensor, mode: str, dtype: torch.dtype, *, true_hides: bool = False) -> Tensor:
    """A checked mask as numbers to add to scores, in `dtype`. `true_hides` is the meaning of a bool mask."""
    if mask.dtype == torch.bool or mode == "mul":
        hidden = mask if mask.dtype == torch.bool and true_hides else mask == 0
        return torch.zeros_like(mask, dtype=dtype).masked_fill(hidden, float("-inf"))
    if mask.dtype == torch.float16:
        return mask.to(dtype).masked_fill(mask <= torch.finfo(torch.float16).min, float("-inf"))
    return mask.to(dtype)


def hide(added: Tensor) -> Tensor:
    """Replace numbers below `HIDES_BELOW` by -inf. `added` is the sum of everything that is added to a score."""
    return added.masked_fill(added < HIDES_BELOW, float("-inf"))
