"""Reads the dtype and device that `x.to(...)`, `x.half()`, `x.cuda()` and similar calls ask for from their arguments.

Left out: memory formats, which a partitioned parameter does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from dsx_core.device import Device

from ..torch_names import parse_to

__all__ = ["CONVERSIONS", "conversion_target"]

_DTYPES = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}

CONVERSIONS: frozenset[Callable[..., Any]] = frozenset(
    {*_DTYPES, torch.Tensor.to, torch.Tensor.type, torch.Tensor.cuda, torch.Tensor.cpu}
)
"""The methods that `nn.Module` calls on each parameter to convert a whole module."""


def conversion_target(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.dtype, torch.device]:
    """The dtype and the device that a tensor has after a conversion.

    Args:
        func: one of `CONVERSIONS`.
        args: its arguments without the tensor.
        kwargs: its keyword arguments.
        dtype: dtype of the tensor; it stays if the conversion names none.
        device: device of the tensor; it stays if the conversion names none.
    """
    if func in _DTYPES:
        return _DTYPES[func], device
    if func is torch.Tensor.cpu:
        return dtype, torch.device("cpu")
    if func is torch.Tensor.cuda:
        place = args[0] if args else kwargs.get("device")
        return dtype, _indexed(torch.device("cuda") if place is None else torch.device(place))
    if func is torch.Tensor.type:
        wanted = args[0] if args else kwargs["dtype"]
        like = torch.empty(0, dtype=dtype, device=device).type(wanted)  # names of types such as "torch.cuda.HalfTensor"
        return like.dtype, like.device
    to_device, to_dtype, *_ = parse_to(*args, **kwargs)
    return to_dtype or dtype, device if to_device is None else _indexed(to_device)


def _indexed(device: torch.device) -> torch.device:
    return Device.of(device).torch_device if device.index is None else device
