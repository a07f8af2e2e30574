"""States that an optimizer keeps in codes by a tensor subclass, such as torchao's 8-bit and 4-bit moments.

Their values are read and written as ordinary tensors: for checkpoints, and when states move to another layout. torchao
gives each block of values one scale, its largest absolute value. Its tables of signed numbers end at -0.993 (8 bits)
and -0.888 (4 bits), but at 1 on the other side. So a block that a negative value leads has a smaller scale when its own
values are written again, and all its codes change. `write_codes` gives such a block the scale that it had.

Left out: the codes of dsx's own optimizers, which `states` and the optimizers themselves handle.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["is_coded", "values_of_codes", "write_codes"]


def is_coded(value: Any) -> bool:
    """Is a state a tensor subclass that says itself which values its codes mean?"""
    return isinstance(value, torch.Tensor) and type(value).dequantize is not torch.Tensor.dequantize


def values_of_codes(value: Any) -> Any:
    """The values of a state in codes; any other state itself."""
    return value.dequantize() if is_coded(value) else value


def write_codes(coded: Any, values: torch.Tensor) -> Any:
    """Write values into a state in codes. Values that came out of such codes with the same blocks give the same codes.

    Args:
        coded: the state, with `qmap` and `scale` as torchao's have them (0.18), or others.
        values: of the same shape.

    Returns:
        `coded`.
    """
    table = getattr(coded, "qmap", None)
    if table is not None:
        least = table.min()
        blocks = values.detach().reshape(coded.scale.numel(), -1)
        lowest, place = blocks.min(1, keepdim=True)
        led = (lowest < 0) & (-lowest >= blocks.amax(1, keepdim=True))
        blocks = blocks.scatter(1, place, torch.where(led & (least < 0), lowest / -least, lowest))
        values = blocks.view(values.shape)
    return coded.copy_(values)
