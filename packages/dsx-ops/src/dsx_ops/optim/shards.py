"""Parameters that are DTensors, as FSDP2 and tensor parallelism make them: this rank's shard is what gets updated.

An elementwise rule gives the same numbers shard by shard, so that nothing is communicated. States are DTensors like
their parameter, which is what distributed checkpoints can cut again for another number of ranks. Rules that need whole
tensors (Lamb's norms, scales per block of 8-bit states) refuse. Other tensor subclasses without memory of their own are
refused here too: a kernel would be given no address.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import TensorError
from ..spec import Slot

_PLAIN = (Tensor, Parameter)


def local_slot(slot: Slot, elementwise: bool) -> Slot:
    """The slot with this rank's parts in place of DTensors. Raises `TensorError`."""
    tensors = (slot.param, slot.grad)
    if type(tensors[0]) in _PLAIN and type(tensors[1]) in _PLAIN:
        return slot
    if not any(map(is_distributed, tensors)):
        for tensor in tensors:
            _refuse_wrapper(tensor, slot.name)
        return slot
    if not all(map(is_distributed, tensors)) or _layout(slot.param) != _layout(slot.grad):
        raise TensorError(
            f"{slot.name}: got a parameter as {_said(slot.param)} and a gradient as {_said(slot.grad)}, expected the"
            " same mesh and placements"
        )
    if not elementwise:
        raise TensorError(
            f"{slot.name}: got a DTensor, expected a whole tensor: this optimizer needs norms or scales of whole"
            " tensors; use FusedAdam or FusedLion with FSDP2, or dsx-zero, which reduces the norms"
        )
    return replace(
        slot,
        param=_local(slot.param),
        grad=_local(slot.grad),
        states=tuple(map(_local, slot.states)),
        low_bits=None if slot.low_bits is None else _local(slot.low_bits),
        copy=None if slot.copy is None else _local(slot.copy),
        owner=slot,
    )


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Nothing is imported for the question: a program that has one has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if is_distributed(tensor) else tensor


def _layout(tensor: Any) -> tuple[Any, Any]:
    return tensor.device_mesh, tuple(tensor.placements)


def _said(tensor: Any) -> str:
    return f"DTensor {tuple(tensor.placements)}" if is_distributed(tensor) else type(tensor).__name__


def _refuse_wrapper(tensor: Tensor, name: str) -> None:
    without_memory = (
        tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() > 0 and tensor.data_ptr() == 0
    )
    if is_traceable_wrapper_subclass(tensor) or without_memory:
        raise TensorError(
            f"{name}: got a {type(tensor).__name__}, which has no memory of its own; expected a plain tensor or a"
            " DTensor"
        )
