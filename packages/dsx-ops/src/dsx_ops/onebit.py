"""One bit per element with error feedback: what 1-bit Adam, 0/1 Adam and 1-bit Lamb send instead of a tensor.

    t = x + error;  scale = |t|_2 / sqrt(n);  bits = t >= 0;  error <- t - scale sign(t)

(Tang et al. 2021, "1-bit Adam", section 4)

so that what one round loses is part of the next. Zero counts as positive, NaN as negative (and makes the scale NaN).
Element i lies in bit i % 8 of byte i // 8; the bits beyond the last element are 0. The scale is summed in fp64 in a
fixed order: every instruction set and thread count gives the same one. One exchange of a tensor of n elements (padded
to a multiple of 8 P) between P ranks:

    packed, scale = compress_with_feedback(x, worker_error)        # [n/8] bytes, one number
    ... ranks exchange chunks: rows [P, n/(8P)] and scales [P] arrive ...
    chunk = mean_of_signs(rows, scales)                            # fp32 [n/P]
    packed, scale = compress_with_feedback(chunk, server_error)
    ... all ranks gather: rows [P, n/(8P)], scales [P] ...
    result = unpack_signs(rows, scales)                            # [P, n/P]

Moving bytes is not done here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import library, native
from .checks import check
from .errors import TensorError
from .spec import FLOATS
from .tables import DTYPE_CODES

_PIECE = 1 << 22  # elements the reference works on at a time


def pack_signs(x: Tensor) -> Tensor:
    """The signs of a float tensor as bits: uint8 [ceil(numel / 8)]. Raises `TensorError`."""
    return torch.ops.dsx_ops.pack_signs(x)


def unpack_signs(
    packed: Tensor,
    scale: Tensor,
    numel: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """+scale for set bits, -scale for others.

    `packed`: uint8 [bytes], `scale` one fp32 number, giving [numel]; or `packed` [rows, bytes], `scale` [rows], giving
    [rows, numel]. `numel`: elements per row, 8 * bytes when left out. `out` receives the result in its own dtype.
    Raises `TensorError`.
    """
    count = 8 * packed.shape[-1] if numel is None else numel
    if out is None:
        return torch.ops.dsx_ops.unpack_signs(packed, scale, count, dtype)
    torch.ops.dsx_ops.unpack_signs_out(packed, scale, count, out)
    return out


def compress_with_feedback(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """(packed signs of x + error, scale); `error` (fp32, as many elements as x) becomes what the signs leave out.

    `x` float32, bfloat16 or float16, unchanged. `scale`: fp32, no dimension, on x's device. Raises `TensorError`; then
    `error` is as it was.
    """
    return torch.ops.dsx_ops.compress_signs(x, error)


def mean_of_signs(packed: Tensor, scales: Tensor, *, numel: int | None = None, out: Tensor | None = None) -> Tensor:
    """(1/P) sum over ranks, in their order, of scales[r] * sign_r: fp32 [numel].

    `packed`: uint8 [P, bytes]; `scales`: fp32 [P]; `numel`: 8 * bytes when left out; `out`: fp32 [numel]. Raises
    `TensorError`.
    """
    count = 8 * packed.shape[-1] if numel is None else numel
    if out is None:
        out = torch.empty(count, dtype=torch.float32, device=packed.device)
    torch.ops.dsx_ops.mean_of_signs(packed, scales, count, out)
    return out


# ---- reference -------------------------------------------------------------------------------------------------------


def reference_pack_signs(x: Tensor) -> Tensor:
    """`pack_signs` in plain PyTorch."""
    flat = (x.detach().reshape(-1) >= 0).to(torch.uint8)
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1 << k for k in range(8)], dtype=torch.uint8, device=x.device)
    return (rows * weights).sum(1, dtype=torch.int32).to(torch.uint8)


def reference_unpack_signs(packed: Tensor, scale: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """`unpack_signs` in plain PyTorch."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :numel].bool()
    magnitude = scale if packed.dim() == 1 else scale.unsqueeze(-1)
    return torch.where(bits, magnitude, -magnitude).to(dtype)


def reference_compress(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """`compress_with_feedback` in plain PyTorch, a piece at a time."""
    flat, kept = x.detach().reshape(-1), error.view(-1)
    numel = flat.numel()
    packed = torch.empty(-(-numel // 8), dtype=torch.uint8, device=x.device)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for at in range(0, numel, _PIECE):
        total += (flat[at : at + _PIECE].float() + kept[at : at + _PIECE]).double().square_().sum()
    scale = (total / max(numel, 1)).sqrt().float()
    for at in range(0, numel, _PIECE):
        t = flat[at : at + _PIECE].float() + kept[at : at + _PIECE]
        packed[at // 8 : (at + _PIECE) // 8] = reference_pack_signs(t)
        kept[at : at + _PIECE] = t - torch.where(t >= 0, scale, -scale)
    return packed, scale


def reference_mean_of_signs(packed: Tensor, scales: Tensor, numel: int) -> Tensor:
    """`mean_of_signs` in plain PyTorch."""
    total = torch.zeros(numel, dtype=torch.float32, device=packed.device)
    for row, scale in zip(packed, scales):
        total += reference_unpack_signs(row, scale, numel, torch.float32)
    return total * torch.tensor(1.0 / packed.shape[0], dtype=torch.float32, device=packed.device)


# ---- operators -------------------------------------------------------------------------------------------------------


def _run_pack(x: Tensor) -> Tensor:
    check(x, "pack_signs' input")
    module = native.module_for(x, "pack_signs")
    if module is None:
        return reference_pack_signs(x)
    packed = _fake_pack(x)
    module.pack_signs(DTYPE_CODES[x.dtype], x.data_ptr(), packed.data_ptr(), x.numel(), native.threads())
    return packed


def _fake_pack(x: Tensor) -> Tensor:
    check(x, "pack_signs' input")
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


def _check_packed(packed: Tensor, scale: Tensor, numel: int, out: Tensor | None) -> tuple[int, ...]:
    """Shape of the result."""
    if packed.dim() not in (1, 2):
        raise TensorError(f"packed signs: got shape {tuple(packed.shape)}, expected [bytes] or [rows, bytes]")
    check(packed, "packed signs", dtypes=(torch.uint8,))
    check(scale, "scale of signs", dtypes=(torch.float32,), like=packed)
    rows = 1 if packed.dim() == 1 else packed.shape[0]
    if scale.numel() != rows:
        raise TensorError(f"scale of signs: got {scale.numel()} numbers, expected {rows}, one per row")
    if numel < 0 or (numel + 7) // 8 != packed.shape[-1]:
        raise TensorError(f"numel: got {numel}, expected {packed.shape[-1]} bytes' worth of bits per row")
    shape = (numel,) if packed.dim() == 1 else (packed.shape[0], numel)
    if out is not None:
        check(out, "out", shape=shape, like=packed)
    return shape


def _run_unpack(packed: Tensor, scale: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    out = _fake_unpack(packed, scale, numel, dtype)
    _run_unpack_out(packed, scale, numel, out)
    return out


def _run_unpack_out(packed: Tensor, scale: Tensor, numel: int, out: Tensor) -> None:
    _check_packed(packed, scale, numel, out)
    module = native.module_for(packed, "unpack_signs", out.numel())
    if module is None:
        out.copy_(reference_unpack_signs(packed, scale.reshape(packed.shape[:-1]), numel, out.dtype))
        return
    rows = 1 if packed.dim() == 1 else packed.shape[0]
    module.unpack_signs(
        packed.data_ptr(), scale.data_ptr(), DTYPE_CODES[out.dtype], out.data_ptr(), rows, numel, native.threads()
    )


def _fake_unpack(packed: Tensor, scale: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    shape = _check_packed(packed, scale, numel, None)
    if dtype not in FLOATS:
        raise TensorError(f"dtype: got {dtype}, expected float32, bfloat16 or float16")
    return packed.new_empty(shape, dtype=dtype)


def _fake_unpack_out(packed: Tensor, scale: Tensor, numel: int, out: Tensor) -> None:
    _check_packed(packed, scale, numel, out)


def _check_feedback(x: Tensor, error: Tensor) -> None:
    check(x, "compress_with_feedback's input")
    check(error, "compress_with_feedback's error", dtypes=(torch.float32,), like=x)
    if error.numel() != x.numel():
        raise TensorError(f"compress_with_feedback's error: got {error.numel()} elements, expected {x.numel()}")


def _run_compress(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    _check_feedback(x, error)
    module = native.module_for(x, "compress_with_feedback")
    if module is None:
        return reference_compress(x, error)
    packed, _ = _fake_compress(x, error)
    addresses = (x.data_ptr(), error.data_ptr(), packed.data_ptr())
    scale = module.compress_signs(DTYPE_CODES[x.dtype], *addresses, x.numel(), native.threads())
    return packed, torch.tensor(scale, dtype=torch.float32)


def _fake_compress(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    _check_feedback(x, error)
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8), x.new_empty((), dtype=torch.float32)


def _check_mean(packed: Tensor, scales: Tensor, numel: int, out: Tensor) -> None:
    if packed.dim() != 2 or packed.shape[0] == 0:
        raise TensorError(
            f"packed signs: got shape {tuple(packed.shape)}, expected [ranks, bytes] of at least one rank"
        )
    _check_packed(packed, scales, numel, None)
    check(out, "out", dtypes=(torch.float32,), shape=(numel,), like=packed)


def _run_mean(packed: Tensor, scales: Tensor, numel: int, out: Tensor) -> None:
    _check_mean(packed, scales, numel, out)
    module = native.module_for(packed, "mean_of_signs", packed.shape[0] * numel)
    if module is None:
        out.copy_(reference_mean_of_signs(packed, scales, numel))
        return
    addresses = (packed.data_ptr(), scales.data_ptr(), packed.shape[0], out.data_ptr())
    module.mean_of_signs(*addresses, numel, native.threads())


library.operator("pack_signs(Tensor x) -> Tensor", _run_pack, _fake_pack)
library.operator(
    "unpack_signs(Tensor packed, Tensor scale, int numel, ScalarType dtype) -> Tensor", _run_unpack, _fake_unpack
)
library.operator(
    "unpack_signs_out(Tensor packed, Tensor scale, int numel, Tensor(a!) out) -> ()", _run_unpack_out, _fake_unpack_out
)
library.operator("compress_signs(Tensor x, Tensor(a!) error) -> (Tensor, Tensor)", _run_compress, _fake_compress)
library.operator("mean_of_signs(Tensor packed, Tensor scales, int numel, Tensor(a!) out) -> ()", _run_mean, _check_mean)
