"""Packs codes of few bits into bytes. Rows are padded to full bytes; the first code is in the lowest bits.

binary    1 bit    0 is -1, 1 is +1
ternary   2 bits   code + 1
int4      4 bits   two's complement, or 0 to 15
int8      8 bits   two's complement, or 0 to 255
int16    16 bits   two's complement, or 0 to 65535
"""

from __future__ import annotations

import torch

from .errors import CompressionError

__all__ = ["BITS", "pack", "unpack"]

BITS = {"binary": 1, "ternary": 2, "int4": 4, "int8": 8, "int16": 16}
"""Bits of each stored code, by the code's name."""


def pack(codes: torch.Tensor, code: str, *, signed: bool = True) -> torch.Tensor:
    """Pack codes row by row.

    Args:
        codes: whole numbers, shape (rows, columns).
        code: name of the code, a key of `BITS`.
        signed: whether codes may be negative; it matters for int4, int8 and int16.

    Returns:
        (rows, bytes of a row), uint8. For int8: int8 or uint8 in the shape of `codes`. For int16: int16 in that shape.
    """
    if code == "int8":
        return codes.to(torch.int8 if signed else torch.uint8)
    if code == "int16":
        whole = codes.to(torch.int32)
        return torch.where(whole > 32767, whole - 65536, whole).to(torch.int16)
    bits = BITS[code]
    shifted = {"binary": (codes + 1) / 2, "ternary": codes + 1}.get(code, codes)
    small = shifted.to(torch.int16).bitwise_and(2**bits - 1).to(torch.uint8)
    each = 8 // bits
    rows, columns = small.shape
    small = torch.nn.functional.pad(small, (0, -columns % each)).view(rows, -1, each)
    packed = small[..., 0].clone()
    for place in range(1, each):
        packed.bitwise_or_(small[..., place] << (bits * place))
    return packed


def unpack(packed: torch.Tensor, code: str, columns: int, *, signed: bool = True) -> torch.Tensor:
    """The codes that `pack` was given, as int32 of shape (rows, columns).

    Raises:
        CompressionError: `code` is not a key of `BITS`.
    """
    if code not in BITS:
        raise CompressionError(f"code: got {code!r}, expected one of {', '.join(BITS)}")
    if code == "int8":
        return packed.to(torch.int32)
    if code == "int16":
        whole = packed.to(torch.int32)
        return whole if signed else torch.where(whole < 0, whole + 65536, whole)
    bits = BITS[code]
    each = 8 // bits
    shifts = torch.arange(each, device=packed.device, dtype=torch.uint8) * bits
    small = ((packed[..., None] >> shifts) & (2**bits - 1)).view(len(packed), -1)[:, :columns].to(torch.int32)
    if code == "binary":
        return small * 2 - 1
    if code == "ternary":
        return small - 1
    return torch.where(small > 7, small - 16, small) if signed else small
