"""Kernels of the quantisers and of one-bit signs for CUDA tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import onebit
from ..checks import MASK32
from ..codes import exchange, quantize
from ..codes.scheme import Scheme, Swizzle
from ..tables import DTYPE_CODES, addresses
from . import launch

Codes = tuple[Tensor, Tensor, Tensor]

# ---- quantisation ----------------------------------------------------------------------------------------------------


def run_quantize(module: Any, x: Tensor, *how: Any) -> Codes:
    """`quantize`."""
    out = quantize._fake_quantize(x, *how)
    _start_quantize(module, x, quantize._scheme(*how), out)
    return out


def run_quantize_out(module: Any, x: Tensor, *rest: Any) -> bool:
    """`quantize_out`."""
    quantize._fake_quantize_out(x, *rest)
    _start_quantize(module, x, quantize._scheme(*rest[:-3]), rest[-3:])
    return True


def _start_quantize(module: Any, x: Tensor, scheme: Scheme, out: Sequence[Tensor]) -> None:
    numbers = scheme.numbers(DTYPE_CODES[x.dtype], x.numel())
    seed = scheme.seed & MASK32
    module.quantize(launch.place(x), True, addresses(x, *out), numbers, x.numel(), scheme.stochastic, seed)


def run_dequantize(
    module: Any,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    shape: Sequence[int],
    format: str,
    group: int,
    swizzle: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """`dequantize`."""
    out = quantize._fake_dequantize(codes, scale, zero, shape, format, group, swizzle, dtype)
    _start_dequantize(module, codes, scale, zero, format, group, swizzle, out)
    return out


def run_dequantize_out(module: Any, *arguments: Any) -> bool:
    """`dequantize_out`."""
    quantize._fake_dequantize_out(*arguments)
    _start_dequantize(module, *arguments)
    return True


def _start_dequantize(
    module: Any,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    format: str,
    group: int,
    swizzle: Sequence[int],
    out: Tensor,
) -> None:
    numbers = Scheme(format, group, swizzle=Swizzle(*swizzle)).numbers(DTYPE_CODES[out.dtype], out.numel())
    module.quantize(launch.place(codes), False, addresses(out, codes, scale, zero), numbers, out.numel(), False, 0)


# ---- reduction of several ranks' codes -------------------------------------------------------------------------------


def run_reduce(
    module: Any,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    ranks: int,
    format: str,
    group: int,
    factor: float,
    out: Tensor,
) -> bool:
    """`reduce_codes`."""
    exchange._fake_reduce(codes, scale, zero, ranks, format, group, factor, out)
    _start_reduce(
        module, (codes, scale, zero), ranks, Scheme(format, group), factor, [out.data_ptr(), 0, 0], None, out.numel()
    )
    return True


def run_requantize(
    module: Any,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    ranks: int,
    numel: int,
    format: str,
    group: int,
    factor: float,
    *how: Any,
) -> Codes:
    """`requantize`: the sums exist in registers only."""
    out = exchange._fake_requantize(codes, scale, zero, ranks, numel, format, group, factor, *how)
    made = exchange._made(*how)
    _start_reduce(module, (codes, scale, zero), ranks, Scheme(format, group), factor, addresses(*out), made, numel)
    return out


def _start_reduce(
    module: Any,
    q: Codes,
    ranks: int,
    scheme: Scheme,
    factor: float,
    to: list[int],
    made: Scheme | None,
    numel: int,
) -> None:
    f32 = DTYPE_CODES[torch.float32]
    strides = [q[0].numel() // ranks, q[1].numel() // ranks]
    again = [] if made is None else made.numbers(f32, numel)
    rounding = (False, 0) if made is None else (made.stochastic, made.seed & MASK32)
    numbers = scheme.numbers(f32, numel)
    module.reduce_codes(launch.place(q[0]), addresses(*q), numbers, ranks, strides, factor, to, again, numel, *rounding)


# ---- signs -----------------------------------------------------------------------------------------------------------


def run_pack_signs(module: Any, x: Tensor) -> Tensor:
    """`pack_signs`."""
    packed = onebit._fake_pack(x)
    module.pack_signs(launch.place(x), DTYPE_CODES[x.dtype], x.data_ptr(), packed.data_ptr(), x.numel())
    return packed


def run_unpack_signs(module: Any, packed: Tensor, scale: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """`unpack_signs`."""
    out = onebit._fake_unpack(packed, scale, numel, dtype)
    run_unpack_signs_out(module, packed, scale, numel, out)
    return out


def run_unpack_signs_out(module: Any, packed: Tensor, scale: Tensor, numel: int, out: Tensor) -> bool:
    """`unpack_signs_out`."""
    onebit._check_packed(packed, scale, numel, out)
    rows = 1 if packed.dim() == 1 else packed.shape[0]
    addresses = packed.data_ptr(), scale.data_ptr(), DTYPE_CODES[out.dtype], out.data_ptr()
    module.unpack_signs(launch.place(packed), *addresses, rows, numel)
    return True


def run_compress_signs(module: Any, x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """`compress_signs`; the scale stays on the device."""
    packed, scale = onebit._fake_compress(x, error)
    partials = torch.empty(module.chunks_of(x.numel()), dtype=torch.float64, device=x.device)
    addresses = (x.data_ptr(), error.data_ptr(), packed.data_ptr(), scale.data_ptr(), partials.data_ptr())
    module.compress_signs(launch.place(x), DTYPE_CODES[x.dtype], *addresses, x.numel())
    return packed, scale


def run_mean_of_signs(module: Any, packed: Tensor, scales: Tensor, numel: int, out: Tensor) -> bool:
    """`mean_of_signs`."""
    onebit._check_mean(packed, scales, numel, out)
    addresses = packed.data_ptr(), scales.data_ptr(), packed.shape[0], out.data_ptr()
    module.mean_of_signs(launch.place(packed), *addresses, numel)
    return True


# ---- signs of many runs of one buffer; `sign_runs` has checked the tensors -------------------------------------------


def run_compress_sign_runs(
    module: Any, x: Tensor, error: Tensor, pieces: Tensor, first: Tensor, bits: Tensor, scales: Tensor
) -> bool:
    """`compress_sign_runs`; the scales stay on the device."""
    partials = torch.empty(pieces.shape[0], dtype=torch.float64, device=x.device)
    table = pieces.data_ptr(), pieces.shape[0], first.data_ptr(), first.numel() - 1
    module.compress_sign_runs(launch.place(x), *table, addresses(x, error, bits, scales, partials))
    return True


def run_unpack_sign_runs(module: Any, bits: Tensor, scales: Tensor, pieces: Tensor, out: Tensor) -> bool:
    """`unpack_sign_runs`."""
    table = pieces.data_ptr(), pieces.shape[0]
    module.unpack_sign_runs(launch.place(out), *table, *addresses(bits, scales, out))
    return True


def run_mean_of_sign_runs(
    module: Any,
    bits: Tensor,
    scales: Tensor,
    pieces: Tensor,
    ranks: int,
    bit_stride: int,
    scale_stride: int,
    out: Tensor,
) -> bool:
    """`mean_of_sign_runs`."""
    messages = *addresses(bits, scales), [bit_stride, scale_stride], ranks
    module.mean_of_sign_runs(launch.place(out), pieces.data_ptr(), pieces.shape[0], *messages, out.data_ptr())
    return True
