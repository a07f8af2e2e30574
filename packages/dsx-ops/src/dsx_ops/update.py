"""Chooses who does an update: compiled kernels, torch's fused ones, or the reference.

Also the passes over flat buffers that are not optimizers: norm with overflow check, and scaling.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import low_bit, native, reference
from .backends import native_cpu, torch_cuda
from .cuda import flat as cuda_flat
from .cuda import loader as cuda_loader
from .cuda import optimizers as cuda_optimizers
from .errors import TensorError
from .layouts import put_back, readable, writable
from .spec import FLOATS, Batch

_PLAIN = (Tensor, Parameter)
_INSTEAD = threading.local()


@contextlib.contextmanager
def handed_to(take: Callable[[Batch], None]) -> Iterator[None]:
    """Inside the block the batches that this thread applies are given to `take`, and nothing is computed. For plans,
    which count what a step would do. Other threads of the process compute as ever.
    """
    before = getattr(_INSTEAD, "take", None)
    _INSTEAD.take = take
    try:
        yield
    finally:
        _INSTEAD.take = before


def apply(batch: Batch) -> None:
    """Apply a batch whose slots were checked by `spec.check_slot`. Not for Lamb."""
    take = getattr(_INSTEAD, "take", None)
    if take is not None:
        take(batch)
        return
    if not batch.slots:
        return
    if batch.algorithm in low_bit.RULES:
        low_bit.run(batch)
        return
    device = batch.slots[0].param.device.type
    if device == "cuda":
        found = cuda_loader.module()
        if found is None:
            torch_cuda.run(batch)
        else:
            cuda_optimizers.run(found, batch)
        return
    module = native.module() if device == "cpu" else None
    if module is not None:
        native_cpu.run(module, batch)
        return
    native.warn_slow(batch.numel, batch.algorithm.name.lower())
    reference.run(batch)


def decides_on_device(found_inf: Tensor, tensors: Iterable[Tensor]) -> bool:
    """Whether the kernels read `found_inf` themselves; otherwise the host must."""
    same = all(t.device == found_inf.device for t in tensors)
    return found_inf.is_cuda and same and cuda_loader.module() is not None


def lamb_update(batch: Batch) -> Tensor:
    """Phase 1 of Lamb: moments. Returns fp64 [slots, 2]: |p|^2 and |u|^2, on the slots' device."""
    on_cuda = _cuda_module([batch.slots[0].param])
    if on_cuda is not None:
        return cuda_optimizers.lamb_update(on_cuda, batch)
    module = native.module() if batch.slots[0].param.device.type == "cpu" else None
    if module is not None:
        return native_cpu.lamb_update(module, batch)
    if batch.slots[0].param.device.type == "cpu":
        native.warn_slow(batch.numel, "lamb")
    return reference.lamb_update(batch)


def lamb_apply(batch: Batch, coefficients: Tensor) -> None:
    """Phase 2 of Lamb; `coefficients` fp32 [slots] on the slots' device."""
    on_cuda = _cuda_module([batch.slots[0].param])
    if on_cuda is not None:
        cuda_optimizers.lamb_apply(on_cuda, batch, coefficients)
        return
    module = native.module() if batch.slots[0].param.device.type == "cpu" else None
    if module is not None:
        native_cpu.lamb_apply(module, batch, coefficients)
    else:
        reference.lamb_apply(batch, coefficients)


class Norm(NamedTuple):
    """L2 norm over all tensors, and whether every element is finite."""

    norm: float
    finite: bool


def squared_norms(tensors: Iterable[Tensor]) -> Tensor:
    """Sum of squares of each tensor in fp64, shape [len(tensors)], on the tensors' device (no host sync).

    One pass in a fixed order: the same for every thread count and instruction set. An entry is finite exactly when all
    of its tensor's elements are (squares of finite fp32 numbers cannot overflow fp64). Raises `TensorError`.
    """
    return _squares([readable(t) for t in _checked(tensors)])


def _squares(found: list[Tensor]) -> Tensor:
    on_cuda = _cuda_module(found)
    if on_cuda is not None:
        return cuda_flat.squares(on_cuda, found)
    module = native.module() if all(t.device.type == "cpu" for t in found) else None
    return native_cpu.squares(module, found) if module is not None else reference.squares(found)


def norm(tensors: Iterable[Tensor]) -> Norm:
    """Global L2 norm and overflow check in one pass (on CUDA tensors: waits for the device)."""
    total = float(squared_norms(tensors).sum())
    return Norm(math.sqrt(total) if total >= 0 else math.nan, math.isfinite(total))


def scale_(tensors: Iterable[Tensor], factor: float) -> None:
    """Multiply every tensor by `factor` in place, in fp32, rounding once. Raises `TensorError` before anything is
    written.
    """
    _scale(_checked(tensors), factor)


def _scale(found: list[Tensor], factor: float | Tensor) -> None:
    """`factor` may lie on the device that has kernels of ours."""
    places = [writable(t, f"tensor {i}") for i, t in enumerate(found)]
    dense = [t for t, _ in places]
    on_cuda = _cuda_module(dense)
    module = native.module() if all(t.device.type == "cpu" for t in dense) else None
    if on_cuda is not None:
        cuda_flat.scale(on_cuda, dense, factor)
    elif module is not None:
        native_cpu.scale(module, dense, float(factor))
    else:
        with torch.no_grad():
            for t in dense:
                t.copy_(t.float() * factor) if t.dtype != torch.float32 else t.mul_(factor)
    put_back(copy for _, copies in places for copy in copies)


def clip_(tensors: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all so that their global L2 norm is at most `max_norm`; returns the norm before (fp64, no dimension).

    Coefficient min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_.
    """
    found = _checked(tensors)
    total = _squares([readable(t) for t in found]).sum().sqrt()
    if _cuda_module(found) is not None:
        _scale(found, cuda_flat.clip_factor(total, max_norm))
        return total
    coefficient = clip_coefficient(float(total), max_norm)
    if coefficient < 1.0:
        _scale(found, coefficient)
    return total


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor, before the limit to 1."""
    return max_norm / (norm + 1e-6)


def _cuda_module(tensors: list[Tensor]) -> Any:
    """The CUDA kernels, when there are such and all tensors lie on one device."""
    first = tensors[0].device if tensors else None
    if first is None or first.type != "cuda" or any(t.device != first for t in tensors):
        return None
    return cuda_loader.module()


def _checked(tensors: Iterable[Tensor]) -> list[Tensor]:
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for i, t in enumerate(found):
        if type(t) not in _PLAIN and is_traceable_wrapper_subclass(t):
            raise TensorError(
                f"tensor {i} is a {type(t).__name__}, of which a rank has a part; expected plain tensors: give"
                " .to_local() and add the squared norms up over the ranks, or clip with torch.nn.utils.clip_grad_norm_"
            )
        if t.layout not in (torch.strided, torch.sparse_coo):
            raise TensorError(
                f"tensor {i} is a {t.layout} tensor, expected a dense one or sparse_coo; pass .to_dense()"
            )
        if t.dtype not in FLOATS:
            raise TensorError(f"tensor {i} is {t.dtype}, expected float32, bfloat16 or float16")
    return [t.detach() for t in found]
