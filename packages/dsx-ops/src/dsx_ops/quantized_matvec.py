"""Products of a few vectors with a matrix of 8- or 4-bit codes, on the CPU.

    out = matvec(x, codes, scale, "int4")       # x [vectors, columns] fp32 to [vectors, rows] fp32

Such a product is bound by the bytes of the matrix; the kernel reads a quarter or an eighth of those of fp32 and never
writes the matrix as floats. Codes are two's complement, one byte each for `int8`; for `int4` two in a byte, the even
column in the low half, rows padded to whole bytes. A row has one scale, or one for each group of a multiple of 32
columns.

Without the compiled module `reference` serves: the matrix as floats, multiplied by torch. Sums differ by rounding.
"""

from __future__ import annotations

import torch

from . import native
from .errors import TensorError

__all__ = ["available", "matvec", "reference"]

_BITS = {"int8": 8, "int4": 4}
_BLOCK = 32


def available() -> bool:
    """Whether the compiled kernels are there."""
    module = native.module()
    return module is not None and hasattr(module, "quantized_matvec")


def matvec(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, code: str) -> torch.Tensor:
    """x times the transposed matrix of `codes * scale`.

    Args:
        x: (vectors, columns), fp32.
        codes: (rows, columns) int8, or (rows, ceil(columns / 2)) uint8 for `int4`.
        scale: one number or (rows x groups,) of each row's groups one after the other, fp32.
        code: "int8" or "int4".

    Returns:
        (vectors, rows), fp32.

    Raises:
        TensorError: dtypes, devices or shapes do not fit.
    """
    groups = _checked(x, codes, scale, code)
    module = native.module()
    if groups == 0 or module is None or not available() or (groups > 1 and (x.shape[1] // groups) % _BLOCK):
        return reference(x, codes, scale, code)
    x, codes, scale = x.detach().contiguous(), codes.contiguous(), scale.contiguous()
    out = torch.empty(x.shape[0], codes.shape[0], dtype=torch.float32)
    addresses = [t.data_ptr() for t in (codes, scale, x, out)]
    numbers = [codes.shape[0], x.shape[1], groups, x.shape[0]]
    module.quantized_matvec(_BITS[code], addresses, numbers, native.threads())
    return out


def reference(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, code: str) -> torch.Tensor:
    """The same in plain PyTorch, in the dtype of `x`; arguments as for `matvec`."""
    if code == "int4":
        both = torch.stack([codes & 15, codes >> 4], -1).flatten(1)[:, : x.shape[1]].to(torch.int16)
        codes = torch.where(both > 7, both - 16, both)
    values = codes.to(x.dtype).reshape(scale.numel(), -1) * scale.to(x.dtype)[:, None]
    return x @ values.view(-1, x.shape[1]).t()


def _checked(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, code: str) -> int:
    """Groups of a row; 0 where groups are longer than a row."""
    if code not in _BITS:
        raise TensorError(f"quantized_matvec: got code {code!r}, expected 'int8' or 'int4'")
    dtype = torch.int8 if code == "int8" else torch.uint8
    for name, tensor, kind, dims in (
        ("x", x, torch.float32, 2),
        ("codes", codes, dtype, 2),
        ("scale", scale, torch.float32, 1),
    ):
        if tensor.dtype != kind or tensor.dim() != dims or tensor.device.type != "cpu":
            raise TensorError(
                f"quantized_matvec: {name} is {tensor.dtype} of {tensor.dim()} dimensions on {tensor.device}, expected "
                f"{kind} of {dims} on the CPU"
            )
    columns, rows = x.shape[1], codes.shape[0]
    expected = columns if code == "int8" else -(-columns // 2)
    if codes.shape[1] != expected or not columns:
        raise TensorError(
            f"quantized_matvec: x has {columns} columns, so codes need {expected} bytes in each row, got"
            f" {codes.shape[1]}"
        )
    count = scale.numel()
    if not count or (rows * columns) % count:
        raise TensorError(f"quantized_matvec: got {count} scales for {rows} x {columns} codes, expected a divisor")
    return count // rows if rows and count % rows == 0 else 0
