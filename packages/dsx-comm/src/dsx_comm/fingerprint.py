"""A number for the contents of a tensor: to see whether it was changed, or whether ranks have the same values."""

from __future__ import annotations

import torch

_CHUNK = 1 << 16
_STEP, _MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64  # as signed words


def fingerprint(tensor: torch.Tensor) -> int:
    """A number of 64 bits, signed, that changes when any bit of the tensor does, or their order."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words, rest = data[:whole], data[whole:].to(torch.int64)
    words = (words if words.storage_offset() % 8 == 0 else words.clone()).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)  # on the device: the host waits once, at the end
    for part in (*words.split(_CHUNK), rest):
        # SplitMix64 without its last round (Steele, Lea, Flood 2014): no two words at a place give one number, and
        # their sum does not cancel for values that end in zeros, as those of 16-bit floats and of small whole numbers
        # do.
        mixed = torch.arange(part.numel(), dtype=torch.int64, device=data.device).mul_(_STEP).add_(part)
        mixed.bitwise_xor_((mixed >> 30).bitwise_and_(2**34 - 1)).mul_(_MIX)
        mixed.bitwise_xor_((mixed >> 27).bitwise_and_(2**37 - 1))
        total = total * 31 + mixed.sum()
    return int(total.item())
