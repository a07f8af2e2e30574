"""Adam whose states are rounded stochastically: moments in bfloat16, and moments in 4 bits with a scale per block.

An EMA that changes by less than half a step of its number format stands still when it is rounded to nearest. Rounding
up with the probability of the remainder keeps its expectation. The random bits are a function of seed, step and element
index (`reference.noise`): they do not depend on ranks, pieces or how often training was resumed.

Each function computes the step in fp32 from what the states stand for, and rounds what it keeps. So the first step is
exactly Adam's. These are torch operations on every device; there are no compiled kernels for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import reference
from .spec import BLOCKS, Algorithm, Batch, Lowered, Slot

__all__ = ["RULES", "decode4", "encode4", "levels4", "run"]

_BLOCK = BLOCKS[Algorithm.ADAM4]


def run(batch: Batch) -> None:
    """Apply the update of a batch with one of the `RULES`."""
    numbers = batch.hyper.lowered(batch.algorithm, on_device=True)
    for slot in batch.slots:
        for piece in reference.pieces(slot, _BLOCK):
            RULES[batch.algorithm](piece, numbers)


def _adam_rounded(piece: Slot, h: Lowered) -> None:
    p, states = reference.load_param(piece), tuple(s.float() for s in piece.states)
    reference.adam(p, reference.gradient(piece.grad, h), states, h)
    of_states, of_param = reference.noise(h.seed, piece.offset, p.numel(), p.device)
    for kept, new, random in zip(piece.states, states, (of_states & 0xFFFF, of_states >> 16)):
        kept.copy_(reference.rounded_to_bf16(new, random))
    reference.store_param(piece, p, of_param >> 16)


def _adam4(piece: Slot, h: Lowered) -> None:
    p, count = reference.load_param(piece), piece.param.numel()
    (codes,), scales = piece.states, piece.scales
    m, v = decode4(codes, scales)
    reference.adam(p, reference.gradient(piece.grad, h), (m, v), h)
    of_states, of_param = reference.noise(h.seed, piece.offset, count, p.device)
    new_codes, new_scales = encode4(m, v, (_uniform(of_states), _uniform(of_param)))
    codes.copy_(new_codes)
    for kept, new in zip(scales, new_scales):
        kept.copy_(new)
    reference.store_param(piece, p, of_param & 0xFFFF)


RULES: dict[Algorithm, Callable[[Slot, Lowered], None]] = {
    Algorithm.ADAM_ROUNDED: _adam_rounded,
    Algorithm.ADAM4: _adam4,
}


def _uniform(random: Tensor) -> Tensor:
    """Multiples of 2^-24 in [0, 1), fp32, from 32 random bits."""
    return (random >> 8).to(torch.float32) * 2.0**-24


def levels4(device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of codes, as parts of the block's largest (fp32): (k/7)^2 for the 3 bits of a first moment beside its
    sign, and ((k+1)/16)^2 for the 4 bits of a second moment. So the root of a second moment, which is what a step
    divides by, is in sixteenths, and never 0.
    """
    first = torch.arange(8, device=device, dtype=torch.float32) / 7
    second = torch.arange(1, 17, device=device, dtype=torch.float32) / 16
    return first * first, second * second


def decode4(codes: Tensor, scales: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """First and second moments (fp32, 1-D) of codes (uint8, 1-D; the first moment is in the high four bits) and their
    blocks' scales (fp32).
    """
    words, (first, second) = codes.to(torch.int64), levels4(codes.device)
    by_first, by_second = (reference.per_element(scale, codes.numel(), _BLOCK) for scale in scales)
    m = first[words >> 4 & 7] * by_first
    return torch.where(words >= 128, -m, m), second[words & 15] * by_second


def encode4(m: Tensor, v: Tensor, random: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Codes and scales of moments (fp32, 1-D), rounded up where `random` (for each moment, in [0, 1)) is below the
    remainder. A block with a moment that is no finite number has NaN as its scale.
    """
    sizes, levels = (m.abs(), v), levels4(m.device)
    most = [reference.block_max(size, _BLOCK) for size in sizes]
    first, second = (torch.where(scale.isfinite(), scale, torch.nan) for scale in most)
    codes = [
        _code(size, reference.per_element(scale, size.numel(), _BLOCK), table, u)
        for size, scale, table, u in zip(sizes, (first, second), levels, random)
    ]
    sign = (m < 0).to(torch.int64) << 7
    return (sign | codes[0] << 4 | codes[1]).to(torch.uint8), (first, second)


def _code(x: Tensor, scale: Tensor, levels: Tensor, random: Tensor) -> Tensor:
    part = torch.where(scale > 0, x / scale, 0.0)
    below = (torch.bucketize(part, levels, right=True) - 1).clamp_(0, len(levels) - 2)
    low, high = levels[below], levels[below + 1]
    return below + (random < (part - low) / (high - low))
