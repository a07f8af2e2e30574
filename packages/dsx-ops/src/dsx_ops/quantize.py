"""Groupwise int8 and int4 quantisation: reference, kernels, and `torch.library` registration.

A tensor is cut, in row-major order, into groups of `group_size` elements; each has its scale (and, asymmetric, its
smallest value). Symmetric: code = round(x / scale), scale = max|x| / 127 (7 for int4). Asymmetric: code = round((x - min) / scale),
scale = (max - min) / 255 (15). int4 keeps two codes per byte, the even element in the low half. Rounding to nearest (ties to even), or
stochastic, keyed by seed and element index: the same on every machine and for every way of cutting the tensor at groups.
A group with a NaN or an infinity comes back not finite. Codes, scales and values are equal to the bit with and without native code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import library, native, reference
from .errors import TensorError
from .spec import FLOATS

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MAGIC = 12582912.0


class Quantized(NamedTuple):
    """`codes` uint8 [n] (int8: two's complement when symmetric) or [ceil(n/2)]; `scale`, `zero` fp32 [groups] (`zero` empty when symmetric)."""

    codes: Tensor
    scale: Tensor
    zero: Tensor


def quantize(
    x: Tensor,
    *,
    bits: int = 8,
    group_size: int = 256,
    symmetric: bool = True,
    stochastic: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> Quantized:
    """Quantise a contiguous float tensor. `offset`: index of its first element, which keys stochastic rounding.

    Raises `TensorError` for bits other than 4 and 8, groups that are no multiple of 16, and unfit tensors.
    """
    _check_numbers(bits, group_size, offset)
    if x.dtype not in FLOATS or not x.is_contiguous():
        raise TensorError(
            f"got a {x.dtype} tensor with strides {x.stride()}, expected a contiguous float32, bfloat16 or float16 one"
        )
    return Quantized(*torch.ops.dsx_ops.quantize(x, bits, group_size, symmetric, stochastic, seed, offset))


def dequantize(
    q: Quantized,
    shape: Any,
    *,
    bits: int = 8,
    group_size: int = 256,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The tensor of `shape` and `dtype` that `q` stands for; the other arguments as in `quantize`."""
    _check_numbers(bits, group_size, 0)
    size = torch.Size([shape] if isinstance(shape, int) else shape)
    codes, groups = _sizes(size.numel(), bits, group_size)
    wanted = (codes, groups, 0 if symmetric else groups)
    if tuple(t.numel() for t in q) != wanted or not all(t.is_contiguous() for t in q):
        got = tuple(t.numel() for t in q)
        raise TensorError(
            f"got codes, scales and zeros of {got} elements, expected {wanted}, contiguous, for shape {tuple(size)}"
        )
    if (q.codes.dtype, q.scale.dtype, q.zero.dtype) != (
        torch.uint8,
        torch.float32,
        torch.float32,
    ) or dtype not in FLOATS:
        raise TensorError(
            f"got codes {q.codes.dtype}, scales {q.scale.dtype}, dtype {dtype}; expected uint8, float32, a float dtype"
        )
    return torch.ops.dsx_ops.dequantize(q.codes, q.scale, q.zero, list(size), bits, group_size, symmetric, dtype)


def _check_numbers(bits: int, group_size: int, offset: int) -> None:
    if bits not in (4, 8):
        raise TensorError(f"bits: got {bits}, expected 4 or 8")
    if group_size <= 0 or group_size % 16:
        raise TensorError(f"group_size: got {group_size}, expected a positive multiple of 16")
    if offset < 0 or offset % 16:
        raise TensorError(f"offset: got {offset}, expected a multiple of 16")


def _sizes(numel: int, bits: int, group_size: int) -> tuple[int, int]:
    return (numel if bits == 8 else (numel + 1) // 2), (numel + group_size - 1) // group_size


# ---- reference ----------------------------------------------------------------------------------------------------------


def _levels(bits: int, symmetric: bool) -> int:
    return (1 << (bits - 1 if symmetric else bits)) - 1


def reference_quantize(
    x: Tensor, bits: int, group_size: int, symmetric: bool, stochastic: bool, seed: int, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize` in plain PyTorch operations."""
    flat = x.detach().reshape(-1).float()
    numel, levels = flat.numel(), _levels(bits, symmetric)
    count, groups = _sizes(numel, bits, group_size)
    if numel == 0:
        return flat.new_empty(0, dtype=torch.uint8), flat.new_empty(0), flat.new_empty(0)
    rows = torch.cat([flat, flat[-1:].expand(-numel % group_size)]).view(groups, group_size)
    low = torch.zeros_like(rows[:, 0]) if symmetric else rows.amin(1)
    high = rows.abs().amax(1) if symmetric else rows.amax(1)
    scale = (high - low) / torch.full_like(high, float(levels))
    t = (rows if symmetric else rows - low[:, None]) * reference._inverse(scale)[:, None]
    if stochastic:
        first, _ = reference.noise(seed & 0xFFFFFFFF, offset, groups * group_size, x.device)
        t = t + (first >> 8).to(torch.float32).view_as(t) * 2.0**-24
        nearest = (t + _MAGIC) - _MAGIC
        t = torch.where(t < nearest, nearest - 1.0, nearest)
    t = t.clamp(-levels if symmetric else 0, levels)
    code = ((t + _MAGIC).view(torch.int32) - 0x4B400000) & ((1 << bits) - 1)
    code = code.view(-1)[:numel].to(torch.uint8)
    if bits == 4:
        pairs = torch.nn.functional.pad(code, (0, numel % 2)).view(-1, 2)
        code = pairs[:, 0] | (pairs[:, 1] << 4)
    return code[:count].contiguous(), scale, flat.new_empty(0) if symmetric else low


def reference_dequantize(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    shape: list[int],
    bits: int,
    group_size: int,
    symmetric: bool,
    dtype: torch.dtype,
) -> Tensor:
    """`dequantize` in plain PyTorch operations."""
    numel = torch.Size(shape).numel()
    code = codes.to(torch.int32)
    if bits == 4:
        code = torch.stack([code & 15, code >> 4], 1).view(-1)[:numel]
    if symmetric:
        sign = 1 << (bits - 1)
        code = (code ^ sign) - sign
    value = code.float() * scale.repeat_interleave(group_size)[:numel]
    if not symmetric:
        value = value + zero.repeat_interleave(group_size)[:numel]
    return value.to(dtype).view(shape)


# ---- registration ---------------------------------------------------------------------------------------------------------

_QUANTIZE = "(Tensor x, int bits, int group_size, bool symmetric, bool stochastic, int seed, int offset) -> (Tensor, Tensor, Tensor)"
_DEQUANTIZE = "(Tensor codes, Tensor scale, Tensor zero, int[] shape, int bits, int group_size, bool symmetric, ScalarType dtype) -> Tensor"


def _run_quantize(
    x: Tensor, bits: int, group_size: int, symmetric: bool, stochastic: bool, seed: int, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    module = native.module() if x.device.type == "cpu" else None
    if module is None:
        if x.device.type == "cpu":
            native.warn_slow(x.numel(), "quantize")
        return reference_quantize(x, bits, group_size, symmetric, stochastic, seed, offset)
    codes, scale, zero = _fake_quantize(x, bits, group_size, symmetric, stochastic, seed, offset)
    addresses = [x.data_ptr(), codes.data_ptr(), scale.data_ptr(), zero.data_ptr()]
    numbers = [x.numel(), group_size, bits, offset]
    module.quantize(
        True, addresses, _DTYPES[x.dtype], numbers, symmetric, stochastic, seed & 0xFFFFFFFF, native.threads()
    )
    return codes, scale, zero


def _run_dequantize(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    shape: list[int],
    bits: int,
    group_size: int,
    symmetric: bool,
    dtype: torch.dtype,
) -> Tensor:
    module = native.module() if codes.device.type == "cpu" else None
    if module is None:
        return reference_dequantize(codes, scale, zero, shape, bits, group_size, symmetric, dtype)
    out = torch.empty(shape, dtype=dtype)
    addresses = [out.data_ptr(), codes.data_ptr(), scale.data_ptr(), zero.data_ptr()]
    numbers = [out.numel(), group_size, bits, 0]
    module.quantize(False, addresses, _DTYPES[dtype], numbers, symmetric, False, 0, native.threads())
    return out


def _fake_quantize(
    x: Tensor, bits: int, group_size: int, symmetric: bool, stochastic: bool, seed: int, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    codes, groups = _sizes(x.numel(), bits, group_size)
    scale = x.new_empty(groups, dtype=torch.float32)
    return x.new_empty(codes, dtype=torch.uint8), scale, x.new_empty(0 if symmetric else groups, dtype=torch.float32)


def _fake_dequantize(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    shape: list[int],
    bits: int,
    group_size: int,
    symmetric: bool,
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty(shape, dtype=dtype)


library.operator("quantize" + _QUANTIZE, _run_quantize, _fake_quantize)
library.operator("dequantize" + _DEQUANTIZE, _run_dequantize, _fake_dequantize)
