"""Quantise and dequantise tensors, groupwise, over the compiled kernels or their reference; see `scheme` for the
formats.

A group with a NaN or an infinity comes back not finite. Codes, scales and values are equal to the bit with and without
native code, for every instruction set, thread count and cut at groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import library, native
from ..checks import MASK32, check
from ..errors import TensorError
from ..spec import FLOATS, name_of
from ..tables import DTYPE_CODES, addresses
from . import reference
from .scheme import Scheme, Swizzle


class Quantized(NamedTuple):
    """`codes`: uint8 or fp8 [n] (int4: uint8 [ceil(n/2)]); `scale`, `zero`: fp32 [groups] (`zero` empty unless
    asymmetric).
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor


def format_of(bits: int, symmetric: bool) -> str:
    """The integer format of so many bits."""
    if bits not in (4, 8):
        raise TensorError(f"bits: got {bits}, expected 4 or 8")
    return f"int{bits}" if symmetric else f"int{bits}_asym"


def quantize(
    x: Tensor,
    *,
    bits: int = 8,
    group_size: int = 256,
    symmetric: bool = True,
    stochastic: bool = False,
    seed: int = 0,
    offset: int = 0,
    out: Quantized | None = None,
) -> Quantized:
    """Quantise a contiguous float tensor to integers of 8 or 4 bits.

    `offset`: index of x's first element in the whole buffer, which keys stochastic rounding. `out`: tensors that
    receive the result. Raises `TensorError` for bits other than 4 and 8, odd groups of 4 bits, and unfit tensors.
    """
    return run(x, format_of(bits, symmetric), group_size, stochastic, seed, offset, out=out)


def dequantize(
    q: Quantized,
    shape: int | Sequence[int],
    *,
    bits: int = 8,
    group_size: int = 256,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """The tensor of `shape` and `dtype` that `q` stands for; the other arguments as in `quantize`. `out` receives it,
    in its own dtype.
    """
    return run_back(q, shape, format_of(bits, symmetric), group_size, dtype, out=out)


def quantize_fp8(
    x: Tensor,
    *,
    format: str = "e4m3",
    group_size: int = 256,
    stochastic: bool = False,
    seed: int = 0,
    offset: int = 0,
    out: Quantized | None = None,
) -> Quantized:
    """Quantise to 8-bit floats, scaled so that a group's largest magnitude is the format's.

    Args:
        x: any shape, float32, bfloat16 or float16; taken as one flat row.
        format: "e4m3" or "e5m2".
        group_size: elements that share a scale.
        stochastic: round up or down by chance, so that the mean is x; else to the nearest.
        seed, offset: of the chance: element i draws the number of `offset` + i.
        out: where to write; of the sizes that a call without it gives.

    Returns:
        Codes, one byte per element, and a float32 scale per group.

    Raises:
        TensorError: another dtype, or `out` does not fit.
    """
    return run(x, _fp8(format), group_size, stochastic, seed, offset, out=out)


def dequantize_fp8(
    q: Quantized,
    shape: int | Sequence[int],
    *,
    format: str = "e4m3",
    group_size: int = 256,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """The tensor that `q`, from `quantize_fp8`, stands for: of this `shape` and `dtype`, or written into `out`.
    `format` and `group_size` are those of the quantisation. Raises `TensorError` where sizes do not fit.
    """
    return run_back(q, shape, _fp8(format), group_size, dtype, out=out)


def ds_quantizer(
    input: Tensor, groups: int = 1, bit_num: int = 8, sr: bool = False, asym: bool = False, *, seed: int = 0
) -> Tensor:
    """Round `input` in place to values of 4 or 8 bits per element, in `groups` equal groups; returns it.

    `sr`: stochastic rounding, keyed by `seed`; `asym`: with a zero point. Raises `TensorError` before anything is
    written.
    """
    if groups < 1 or input.numel() % groups:
        raise TensorError(f"groups: got {groups}, expected a divisor of the {input.numel()} elements")
    if input.numel() == 0:
        return input
    format, group = format_of(bit_num, not asym), input.numel() // groups
    with torch.no_grad():
        run_back(run(input, format, group, sr, seed), input.shape, format, group, input.dtype, out=input)
    return input


def _fp8(format: str) -> str:
    if format not in ("e4m3", "e5m2"):
        raise TensorError(f"format: got {format!r}, expected 'e4m3' or 'e5m2'")
    return format


def run(
    x: Tensor,
    format: str,
    group: int,
    stochastic: bool = False,
    seed: int = 0,
    offset: int = 0,
    *,
    swizzle: Sequence[int] = (1, 1, 1),
    out: Quantized | None = None,
) -> Quantized:
    """Quantise by the numbers of a `Scheme`; `swizzle`: nodes, devices, pipeline."""
    how = (format, group, stochastic, seed & MASK32, offset, list(swizzle))
    if out is None:
        return Quantized(*torch.ops.dsx_ops.quantize(x, *how))
    torch.ops.dsx_ops.quantize_out(x, *how, *out)
    return out


def run_back(
    q: Quantized,
    shape: int | Sequence[int],
    format: str,
    group: int,
    dtype: torch.dtype,
    *,
    swizzle: Sequence[int] = (1, 1, 1),
    out: Tensor | None = None,
) -> Tensor:
    """Dequantise by the numbers of a `Scheme`."""
    size = [shape] if isinstance(shape, int) else list(shape)
    if out is None:
        return torch.ops.dsx_ops.dequantize(*q, size, format, group, list(swizzle), dtype)
    if list(out.shape) != size:
        raise TensorError(f"out: got shape {tuple(out.shape)}, expected {tuple(size)}")
    torch.ops.dsx_ops.dequantize_out(*q, format, group, list(swizzle), out)
    return out


# ---- operators -------------------------------------------------------------------------------------------------------


def _scheme(format: str, group: int, stochastic: bool, seed: int, offset: int, swizzle: Sequence[int]) -> Scheme:
    return Scheme(format, group, stochastic, seed, offset, Swizzle(*swizzle))


def check_codes(q: Sequence[Tensor], numel: int, scheme: Scheme) -> None:
    """Raise `TensorError` unless the tensors are those of `numel` elements."""
    wanted = scheme.sizes(numel)
    if tuple(t.numel() for t in q) != wanted:
        got = tuple(t.numel() for t in q)
        raise TensorError(f"got codes, scales and zeros of {got} elements, expected {wanted} for {numel} elements")
    dtypes = (scheme.kind.dtype, torch.float32, torch.float32)
    for tensor, role, dtype in zip(q, ("codes", "scales", "zeros"), dtypes):
        check(tensor, role, dtypes=(dtype,), like=q[0])


def empty_codes(x: Tensor, numel: int, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors for the codes of `numel` elements, on x's device."""
    codes, groups, zeros = scheme.sizes(numel)
    scale = x.new_empty(groups, dtype=torch.float32)
    return x.new_empty(codes, dtype=scheme.kind.dtype), scale, x.new_empty(zeros, dtype=torch.float32)


def _fake_quantize(x: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    check(x, "quantize's input")
    return empty_codes(x, x.numel(), _scheme(*how))


def _run_quantize(x: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = _fake_quantize(x, *how)
    _run_quantize_out(x, *how, *out)
    return out


def _fake_quantize_out(x: Tensor, *how: Any) -> None:
    check(x, "quantize's input")
    check_codes(how[-3:], x.numel(), _scheme(*how[:-3]))


def _run_quantize_out(x: Tensor, *how: Any) -> None:
    _fake_quantize_out(x, *how)
    scheme, out = _scheme(*how[:-3]), how[-3:]
    module = native.module_for(x, "quantize")
    if module is None:
        for kept, new in zip(out, reference.quantize(x, scheme)):
            kept.view(-1).copy_(new)
        return
    numbers = scheme.numbers(DTYPE_CODES[x.dtype], x.numel())
    seed = scheme.seed & MASK32
    module.quantize(True, addresses(x, *out), numbers, x.numel(), scheme.stochastic, seed, native.threads())


def _fake_dequantize(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    shape: Sequence[int],
    format: str,
    group: int,
    swizzle: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    if dtype not in FLOATS:
        raise TensorError(f"dtype: got {name_of(dtype)}, expected float32, bfloat16 or float16")
    out = codes.new_empty(shape, dtype=dtype)
    _fake_dequantize_out(codes, scale, zero, format, group, swizzle, out)
    return out


def _run_dequantize(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    shape: Sequence[int],
    format: str,
    group: int,
    swizzle: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    out = _fake_dequantize(codes, scale, zero, shape, format, group, swizzle, dtype)
    _run_dequantize_out(codes, scale, zero, format, group, swizzle, out)
    return out


def _fake_dequantize_out(
    codes: Tensor, scale: Tensor, zero: Tensor, format: str, group: int, swizzle: Sequence[int], out: Tensor
) -> None:
    check(out, "out", like=codes)
    check_codes((codes, scale, zero), out.numel(), Scheme(format, group, swizzle=Swizzle(*swizzle)))


def _run_dequantize_out(
    codes: Tensor, scale: Tensor, zero: Tensor, format: str, group: int, swizzle: Sequence[int], out: Tensor
) -> None:
    _fake_dequantize_out(codes, scale, zero, format, group, swizzle, out)
    scheme = Scheme(format, group, swizzle=Swizzle(*swizzle))
    module = native.module_for(codes, "dequantize")
    if module is None:
        out.copy_(reference.dequantize(codes, scale, zero, out.numel(), scheme).view_as(out))
        return
    numbers = scheme.numbers(DTYPE_CODES[out.dtype], out.numel())
    module.quantize(False, addresses(out, codes, scale, zero), numbers, out.numel(), False, 0, native.threads())


_HOW = "str format, int group_size, bool stochastic, int seed, int offset, int[] swizzle"
library.operator(f"quantize(Tensor x, {_HOW}) -> (Tensor, Tensor, Tensor)", _run_quantize, _fake_quantize)
library.operator(
    f"quantize_out(Tensor x, {_HOW}, Tensor(a!) codes, Tensor(b!) scale, Tensor(c!) zero) -> ()",
    _run_quantize_out,
    _fake_quantize_out,
)
library.operator(
    "dequantize(Tensor codes, Tensor scale, Tensor zero, int[] shape, str format, int group_size, int[] swizzle, "
    "ScalarType dtype) -> Tensor",
    _run_dequantize,
    _fake_dequantize,
)
library.operator(
    "dequantize_out(Tensor codes, Tensor scale, Tensor zero, str format, int group_size, int[] swizzle, Tensor(a!) out)"
    " -> ()",
    _run_dequantize_out,
    _fake_dequantize_out,
)
