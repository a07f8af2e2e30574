"""Blockwise int8 and int4: what travels in quantised gathers and reductions.

A tensor is cut, in row-major order, into blocks; each has a float32 scale, max|x| / 127 (7 for int4), and codes
round(x / scale), ties to even, two's complement, for int4 two in a byte with the even element in the low half. One message:

    [scales: fp32 x blocks][codes][padding to 4 bytes]

A block with a NaN or an infinity comes back as NaN. The reference here is plain torch; `dsx_ops` makes the same codes where
it is installed with native code (hosts may differ in that).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CommArgumentError

_LEVELS = {8: 127.0, 4: 7.0}
SCALE_BYTES = 4


@dataclass(frozen=True)
class BlockFormat:
    """Bits per code (8 or 4) and elements per block (a positive even number)."""

    bits: int = 8
    block: int = 2048

    def __post_init__(self) -> None:
        if self.bits not in _LEVELS:
            raise CommArgumentError(f"bits: got {self.bits!r}, expected 8 or 4")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 2 or self.block % 2:
            raise CommArgumentError(f"block_size: got {self.block!r}, expected a positive even number of elements")

    def blocks(self, numel: int) -> int:
        """Number of blocks, the last one possibly shorter."""
        return -(-numel // self.block)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes."""
        return -(-numel * self.bits // 8)

    def message_bytes(self, numel: int) -> int:
        """Bytes of one message."""
        return SCALE_BYTES * self.blocks(numel) + -(-self.code_bytes(numel) // 4) * 4

    def parts(self, message: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales (float32) and codes (uint8) in a message (uint8), sharing its memory."""
        cut = SCALE_BYTES * self.blocks(numel)
        return message[:cut].view(torch.float32), message[cut : cut + self.code_bytes(numel)]


def quantize_into(message: torch.Tensor, x: torch.Tensor, form: BlockFormat) -> None:
    """Fill a message (uint8, `message_bytes`) with a contiguous 1-D float tensor."""
    scales, codes = form.parts(message, x.numel())
    ops = _native(x)
    if ops is not None:
        made = ops.quantize(x, bits=form.bits, group_size=form.block)
        scales.copy_(made.scale)
        codes.copy_(made.codes)
        return
    numel, levels = x.numel(), _LEVELS[form.bits]
    rows = torch.nn.functional.pad(x.to(torch.float32), (0, -numel % form.block)).view(-1, form.block)
    found = rows.abs().amax(1) / levels
    scales.copy_(found)
    inverse = torch.where(found > 0, 1.0 / found, torch.zeros_like(found))
    whole = (rows * inverse[:, None]).round_().nan_to_num_(nan=levels, posinf=levels, neginf=-levels)
    values = whole.clamp_(-levels, levels).to(torch.int8).view(-1)[:numel].view(torch.uint8)
    if form.bits == 4:
        pairs = torch.nn.functional.pad(values, (0, numel % 2)).view(-1, 2) & 15
        values = pairs[:, 0] | (pairs[:, 1] << 4)
    codes.copy_(values)


def dequantize_from(message: torch.Tensor, numel: int, form: BlockFormat) -> torch.Tensor:
    """The float32 tensor (1-D) that a message stands for."""
    scales, codes = form.parts(message, numel)
    ops = _native(codes)
    if ops is not None:
        made = ops.Quantized(codes.contiguous(), scales.contiguous(), scales.new_empty(0))
        return ops.dequantize(made, numel, bits=form.bits, group_size=form.block)
    values = codes.view(torch.int8)
    if form.bits == 4:
        # the low half moved up and back down again, so that its sign spreads
        low, high = (codes << 4).view(torch.int8) >> 4, values >> 4
        values = torch.stack([low, high], 1).view(-1)[:numel]
    out = torch.nn.functional.pad(values.to(torch.float32), (0, -numel % form.block)).view(-1, form.block)
    return (out * scales[:, None]).view(-1)[:numel]


def _native(x: torch.Tensor) -> Any:
    """dsx_ops if its compiled code can work on this tensor, else None."""
    if x.device.type != "cpu" or not x.numel():
        return None
    try:
        import dsx_ops  # late: optional
    except ImportError:
        return None
    return dsx_ops if dsx_ops.native_status()["native"] else None
