"""Blockwise int8, int4 and 2 bits: what travels in quantised gathers and reductions.

A tensor is cut, in row-major order, into blocks; each has a float32 scale, max|x| / 127 (7 for int4), and codes
round(x / scale), ties to even, two's complement, for int4 two in a byte with the even element in the low half.

With 2 bits an element is -3, -1, 1 or 3 times the scale, four codes in a byte. Which of them is chosen as for a normal
distribution (beyond 0.996 root mean squares is 3), and the scale is then the one of least squares, so that what a
message leaves out is never more than what it is a message of, whatever the distribution: error feedback needs that.

One message:

    [scales: fp32 x blocks][codes][padding to 4 bytes]

A block with a NaN or an infinity comes back as NaN. Several messages lie one after the other and are made or read in
one go, on the CPU and on CUDA by the kernels of `dsx_ops` where it has them (`block_kernels`), else in plain torch; the
codes are the same, so that hosts may differ in that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CommArgumentError

_LEVELS = {8: 127.0, 4: 7.0, 2: 3.0}
_STEP = 0.996
"""Of 2-bit codes, in root mean squares: the uniform quantiser of four levels with the least error for a normal
distribution (J. Max, 1960, table 2).
"""
SCALE_BYTES = 4


@dataclass(frozen=True)
class BlockFormat:
    """Bits per code (8, 4 or 2) and elements per block (a positive even number; for 2 bits a multiple of 4)."""

    bits: int = 8
    block: int = 2048

    def __post_init__(self) -> None:
        if self.bits not in _LEVELS:
            raise CommArgumentError(f"bits: got {self.bits!r}, expected 8, 4 or 2")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 2 or self.block % 2:
            raise CommArgumentError(f"block_size: got {self.block!r}, expected a positive even number of elements")
        if self.bits == 2 and self.block % 4:
            raise CommArgumentError(f"block_size: got {self.block}, expected a multiple of 4 for codes of 2 bits")

    def blocks(self, numel: int) -> int:
        """Number of blocks, the last one possibly shorter."""
        return -(-numel // self.block)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes."""
        return -(-numel * self.bits // 8)

    def message_bytes(self, numel: int) -> int:
        """Bytes of one message."""
        return SCALE_BYTES * self.blocks(numel) + -(-self.code_bytes(numel) // 4) * 4

    def padded(self, numel: int) -> int:
        """Elements of all blocks, the last one made whole."""
        return self.blocks(numel) * self.block

    def parts(self, messages: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales (float32) and codes (uint8) in messages (uint8, message in the last dimension), sharing their
        memory.
        """
        cut = SCALE_BYTES * self.blocks(numel)
        codes = messages.narrow(-1, cut, self.code_bytes(numel))
        return messages.narrow(-1, 0, cut).view(torch.float32), codes


def quantize_rows(rows: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """One message per row of a contiguous float tensor [R, n]: uint8 [R, `message_bytes`]."""
    count, numel = rows.shape
    if not rows.numel():
        return rows.new_zeros(count, form.message_bytes(numel), dtype=torch.uint8)
    ops = _kernels(rows.device, form)
    if form.bits == 2:
        scales, codes = _quantize_2_bits(_in_blocks(rows, form), numel)
    elif ops is None:
        scales, codes = _quantize(_in_blocks(rows, form), form)
    else:
        made = ops.quantize(_whole_blocks(rows, form).view(-1), bits=form.bits, group_size=form.block)
        scales, codes = made.scale.view(count, -1), made.codes.view(count, -1)
    padding = codes.new_zeros(count, -form.code_bytes(numel) % 4)
    return torch.cat([scales.view(torch.uint8), codes.narrow(1, 0, form.code_bytes(numel)), padding], 1)


def dequantize_rows(messages: torch.Tensor, form: BlockFormat, out: torch.Tensor) -> None:
    """out (float [R, n], contiguous) = what the messages (uint8 [R, `message_bytes`]) stand for."""
    count, numel = out.shape
    if not out.numel():
        return
    ops = _kernels(out.device, form)
    scales, codes = form.parts(messages, numel)
    if ops is None:
        out.copy_(_dequantize(codes, scales, numel, form))
        return
    how = {"bits": form.bits, "group_size": form.block}
    padded = form.padded(numel)
    if numel == padded or count == 1:
        q = _quantized(ops, codes, scales)
        ops.dequantize(q, out.numel(), out=out.view(-1), **how)
        return
    q = _quantized(ops, torch.nn.functional.pad(codes, (0, form.code_bytes(padded) - codes.shape[1])), scales)
    out.copy_(ops.dequantize(q, count * padded, dtype=out.dtype, **how).view(count, padded).narrow(1, 0, numel))


def sum_rows(messages: torch.Tensor, numel: int, form: BlockFormat) -> torch.Tensor:
    """The float32 sum [n] of what the messages (uint8 [R, `message_bytes`]) stand for, added up in their order."""
    total = torch.zeros(numel, device=messages.device)
    if not numel:
        return total
    ops = _kernels(messages.device, form)
    scales, codes = form.parts(messages, numel)
    if ops is None:
        for row, numbers in zip(codes, scales):
            total.add_(_dequantize(row[None], numbers[None], numel, form)[0])
        return total
    q = _quantized(ops, codes, scales)
    return ops.codes.exchange.reduce_dequantize(
        q, ranks=messages.shape[0], numel=numel, bits=form.bits, group_size=form.block, out=total
    )


def _kernels(device: torch.device, form: BlockFormat) -> Any:
    """The kernels for this format, if there are any."""
    return None if form.bits == 2 else block_kernels(device)


def _quantized(ops: Any, codes: torch.Tensor, scales: torch.Tensor) -> Any:
    """Codes and scales of several messages as dsx_ops takes them: one after the other, without what lies between."""
    dense = (t if t.is_contiguous() else t.clone(memory_format=torch.contiguous_format) for t in (codes, scales))
    return ops.codes.quantize.Quantized(*(t.view(-1) for t in dense), scales.new_empty(0))


def _whole_blocks(rows: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The rows, each with zeros up to the end of its last block."""
    numel = rows.shape[1]
    return rows if numel == form.padded(numel) else torch.nn.functional.pad(rows, (0, form.padded(numel) - numel))


def _in_blocks(rows: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    return _whole_blocks(rows.to(torch.float32), form).view(rows.shape[0], -1, form.block)


# - plain torch


def _quantize(blocks: torch.Tensor, form: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [R, B] and codes [R, bytes] of float32 blocks [R, B, block]."""
    levels, rows = _LEVELS[form.bits], blocks.shape[0]
    scales = blocks.abs().amax(2) / levels
    inverse = torch.where(scales > 0, 1.0 / scales, torch.zeros_like(scales))
    whole = (blocks * inverse[..., None]).round_().nan_to_num_(nan=levels, posinf=levels, neginf=-levels)
    codes = whole.clamp_(-levels, levels).to(torch.int8).view(rows, -1).view(torch.uint8)
    if form.bits == 4:
        pairs = codes.view(rows, -1, 2) & 15
        codes = pairs[..., 0] | (pairs[..., 1] << 4)
    return scales, codes


def _quantize_2_bits(blocks: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `_quantize`, for 2 bits. `numel`: elements of a row, without what fills its last block."""
    rows, number, size = blocks.shape
    there = torch.arange(number * size, device=blocks.device).lt(numel).view(number, size)
    counts = there.sum(1, keepdim=True)
    beyond = blocks.square().sum(2, keepdim=True).div(counts).sqrt_().mul_(_STEP)
    odd = torch.where(blocks.abs() > beyond, 3.0, 1.0) * torch.where(blocks < 0, -1.0, 1.0)
    scales = (blocks * odd).sum(2) / (odd.square() * there).sum(2)
    scales = torch.where(scales.isfinite(), scales, torch.full_like(scales, float("nan")))
    codes = odd.add_(3.0).div_(2.0).to(torch.uint8).view(rows, -1, 4)
    return scales, codes[..., 0] | (codes[..., 1] << 2) | (codes[..., 2] << 4) | (codes[..., 3] << 6)


def _dequantize(codes: torch.Tensor, scales: torch.Tensor, numel: int, form: BlockFormat) -> torch.Tensor:
    """float32 [R, n] from codes [R, bytes] and scales [R, B]."""
    values = codes.contiguous().view(torch.int8)
    if form.bits == 2:
        codes = codes.contiguous()
        parts = [(codes >> shift) & 3 for shift in (0, 2, 4, 6)]
        values = torch.stack(parts, 2).view(codes.shape[0], -1).narrow(1, 0, numel).to(torch.int8).mul_(2).sub_(3)
    elif form.bits == 4:
        # the low half moved up and back down again, so that its sign spreads
        low, high = (codes << 4).view(torch.int8) >> 4, values >> 4
        values = torch.stack([low, high], 2).view(codes.shape[0], -1).narrow(1, 0, numel)
    blocks = _in_blocks(values, form)
    return (blocks * scales[..., None]).view(codes.shape[0], -1).narrow(1, 0, numel)


def block_kernels(device: torch.device) -> Any:
    """The module dsx_ops if it has compiled kernels for tensors on this device, else None."""
    try:
        import dsx_ops  # lazy import: optional
    except ImportError:
        return None
    return None if dsx_ops.status.missing_kernels(device) else dsx_ops
