"""Random generators that are a function of integers alone, so that a position in a run decides its random choices."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["generator", "mixed", "uniform"]


def generator(*numbers: int) -> torch.Generator:
    """A generator whose sequence is a function of `numbers`. It is the same on every rank and machine."""
    made = torch.Generator()
    made.manual_seed(mixed(numbers) >> 1)
    return made


def uniform(*numbers: int) -> float:
    """A number in [0, 1) that is a function of `numbers`; different `numbers` give evenly distributed results."""
    return (mixed(numbers) >> 11) / float(1 << 53)


def mixed(numbers: tuple[int, ...]) -> int:
    """A hash of `numbers`: an integer from 0 to 2^64 - 1."""
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little")
