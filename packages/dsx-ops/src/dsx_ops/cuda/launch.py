"""From tensors to what the CUDA module takes beside tables: a place (device, stream), vectors, numbers on the
device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import TensorError
from ..tables import DTYPE_CODES

_SCALARS = {torch.float32: 0, torch.float64: 1, torch.int64: 2}

Place = tuple[int, int]
Scalar = tuple[float, int, int]
Vector = tuple[int, int]


def place(tensor: Tensor) -> Place:
    """(device index, stream handle) of torch's current stream on the tensor's device.

    A host tensor gives (0, 0), which only the emulator of the tests takes.
    """
    if tensor.device.type != "cuda":
        return (0, 0)
    stream = torch.cuda.current_stream(tensor.device)
    return (stream.device_index, stream.cuda_stream)


def one_device(tensors: Sequence[Tensor]) -> torch.device:
    """The device that all tensors share. Raises `TensorError`."""
    device = tensors[0].device
    for t in tensors:
        if t.device != device:
            raise TensorError(f"got tensors on {device} and {t.device}, expected one device in a call")
    return device


def vector(tensor: Tensor | None) -> Vector:
    """(address, dtype) of a vector along the columns."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), DTYPE_CODES[tensor.dtype])


def lies_on(value: object, device: torch.device) -> bool:
    """Whether `value` is a number that must be read on the device."""
    return isinstance(value, Tensor) and value.device == device


def scalar(value: float | Tensor, device: torch.device) -> Scalar:
    """(value, address, type): by value, or by address when it lies on the device. The caller keeps the tensor alive
    until the launch.
    """
    if not isinstance(value, Tensor) or value.device != device:
        return (float(value), 0, 0)
    if value.dtype not in _SCALARS:
        raise TensorError(
            f"got a {value.dtype} number on {device}, expected float32, float64 or int64; convert it with .float()"
        )
    return (0.0, value.data_ptr(), _SCALARS[value.dtype])
