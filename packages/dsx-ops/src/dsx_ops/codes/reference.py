"""Quantisation in plain PyTorch operations: oracle of the kernels, and what runs where there are none. Equal to them to
the bit on CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..checks import MASK32
from .scheme import Scheme

_MAGIC = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_FP8 = {  # mantissa bits, exponent bias, largest finite code, 1 / the distance of subnormal numbers
    "e4m3": (3, 7, 0x7E, 512.0),
    "e5m2": (2, 15, 0x7B, 65536.0),
}


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale; 0 where fp32 cannot invert it."""
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(scale < tiny, torch.zeros_like(scale), scale.reciprocal())


def quantize(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, zero)."""
    kind, numel = scheme.kind, x.numel()
    count, groups, _ = scheme.sizes(numel)
    flat = x.detach().reshape(-1).float()
    if numel == 0:
        return flat.new_empty(0).to(kind.dtype), flat.new_empty(0), flat.new_empty(0)
    rows = torch.cat([flat, flat[-1:].expand(-numel % scheme.group)]).view(groups, scheme.group)
    low = torch.zeros_like(rows[:, 0]) if kind.symmetric else rows.amin(1)
    high = rows.abs().amax(1) if kind.symmetric else rows.amax(1)
    scale = (high - low) / torch.full_like(high, kind.levels)
    t = (rows if kind.symmetric else rows - low[:, None]) * _inverse(scale)[:, None]
    random = None
    if scheme.stochastic:
        first, _ = reference.noise(scheme.seed & MASK32, scheme.offset, groups * scheme.group, x.device)
        random = (first >> 8).view_as(t)
    order = scheme.swizzle.source(groups).to(x.device)
    codes = (_fp8 if scheme.format in _FP8 else _integer)(t, random, scheme)[order].view(-1)[:numel]
    if kind.bits == 4:
        pairs = torch.nn.functional.pad(codes, (0, numel % 2)).view(-1, 2)
        codes = pairs[:, 0] | (pairs[:, 1] << 4)
    zero = flat.new_empty(0) if kind.symmetric else low[order]
    return codes[:count].contiguous().view(kind.dtype), scale[order], zero


def _rounded_up_or_down(t: Tensor, random: Tensor) -> Tensor:
    t = t + random.to(torch.float32) * 2.0**-24
    nearest = (t + _MAGIC) - _MAGIC
    return torch.where(t < nearest, nearest - 1.0, nearest)


def _integer(t: Tensor, random: Tensor | None, scheme: Scheme) -> Tensor:
    if random is not None:
        t = _rounded_up_or_down(t, random)
    t = t.clamp(-scheme.kind.levels if scheme.kind.symmetric else 0.0, scheme.kind.levels)
    return (((t + _MAGIC).view(torch.int32) - 0x4B400000) & ((1 << scheme.kind.bits) - 1)).to(torch.uint8)


def _fp8(t: Tensor, random: Tensor | None, scheme: Scheme) -> Tensor:
    if random is None:
        return t.clamp(-scheme.kind.levels, scheme.kind.levels).to(scheme.kind.dtype).view(torch.uint8)
    mantissa, bias, top, per_step = _FP8[scheme.format]
    shift = 23 - mantissa
    magnitude = t.abs().clamp(max=scheme.kind.levels)
    bits = magnitude.view(torch.int32).to(torch.int64)
    normal = (((bits + (random >> (24 - shift))) >> shift) - ((127 - bias) << mantissa)).clamp(max=top)
    steps = _rounded_up_or_down(magnitude * per_step, random)
    code = torch.where(
        bits < (128 - bias) << 23, (steps + _MAGIC).view(torch.int32).to(torch.int64) - 0x4B400000, normal
    )
    sign = (t.view(torch.int32) < 0).to(torch.int64) << 7
    return (torch.where(t.isnan(), torch.full_like(code, 0x7F), code) | sign).to(torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, numel: int, scheme: Scheme) -> Tensor:
    """fp32 [numel]."""
    groups = scale.numel()
    if scheme.format in _FP8:
        value = codes.view(-1).float()
    else:
        code = codes.view(-1).to(torch.int32)
        if scheme.kind.bits == 4:
            code = torch.stack([code & 15, code >> 4], 1).view(-1)[:numel]
        if scheme.kind.symmetric:
            sign = 1 << (scheme.kind.bits - 1)
            code = (code ^ sign) - sign
        value = code.float()
    value = value * scale.repeat_interleave(scheme.group)[:numel]
    if not scheme.kind.symmetric:
        value = value + zero.repeat_interleave(scheme.group)[:numel]
    if scheme.swizzle.slice(groups) == 0:
        return value
    back = scheme.swizzle.source(groups).argsort().to(value.device)
    return value.view(groups, scheme.group)[back].view(-1)


def reduce(q: tuple[Tensor, ...], numel: int, scheme: Scheme, factor: float) -> Tensor:
    """fp32 [numel]: the sum over ranks, in order, times `factor`. `q`: codes [ranks, bytes], scales and zeros [ranks,
    groups].
    """
    codes, scale, zero = q
    total = dequantize(codes[0], scale[0], zero[0], numel, scheme)
    for r in range(1, codes.shape[0]):
        total = total + dequantize(codes[r], scale[r], zero[r], numel, scheme)
    return total * torch.full((), factor, dtype=torch.float32, device=total.device)
