"""The keys that a query sees, and the weights that dropout keeps. Both depend on positions in the whole sequence only,
so that they are the same however the sequence is split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ActivationArgumentError

__all__ = ["Dropout", "Visible"]


@dataclass(frozen=True)
class Visible:
    """The keys that a query may see.

    Attributes:
        causal: a token sees itself and the tokens before it.
        window: it sees the tokens that are less than `window` away; None: no limit.
        documents: (batch, length) of the whole sequence, whole numbers: a token sees the tokens of its own number. A
            negative number is padding, which sees nothing and is seen by nothing. None: one document.
    """

    causal: bool = False
    window: int | None = None
    documents: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether a kernel that knows `is_causal` is enough."""
        return self.window is None and self.documents is None

    def keys_of(self, rows: tuple[int, int], keys: tuple[int, int]) -> tuple[int, int]:
        """The part of a range of keys that some query of a range of rows can see, without a look at documents."""
        first, behind = keys
        if self.causal:
            behind = min(behind, rows[1])
        if self.window is not None:
            first, behind = max(first, rows[0] - self.window + 1), min(behind, rows[1] + self.window - 1)
        return first, behind

    def hidden(self, rows: tuple[int, int], keys: tuple[int, int], device: torch.device) -> torch.Tensor | None:
        """The mask of the keys of a range that are hidden from a range of rows.

        Returns:
            (batch or 1, rows, keys) of bool, or None where nothing is hidden.
        """
        found: torch.Tensor | None = None
        nearest, farthest = keys[1] - 1 - rows[0], rows[1] - 1 - keys[0]  # of key behind query, of query behind key
        hides_later = self.causal and nearest > 0
        hides_far = self.window is not None and max(farthest, nearest) >= self.window
        if hides_later or hides_far:
            behind = torch.arange(*rows, device=device)[:, None] - torch.arange(*keys, device=device)
            if hides_later:
                found = behind < 0
            if self.window is not None and hides_far:
                far = behind.abs() >= self.window
                found = far if found is None else found | far
            found = None if found is None else found[None]
        if self.documents is not None:
            of_rows, of_keys = (self.documents[:, slice(*one)] for one in (rows, keys))
            other = (of_rows[:, :, None] != of_keys[:, None, :]) | (of_rows < 0)[:, :, None]
            found = other if found is None else found | other
        return found

    def mask(self, length: int, device: torch.device) -> torch.Tensor | None:
        """The visible keys, as one mask (batch or 1, 1, length, length) for kernels that take one."""
        hidden = self.hidden((0, length), (0, length), device)
        return None if hidden is None else ~hidden[:, None]


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights whose choice is a function of seed, sample, head, query and key.

    Attributes:
        p: share of weights that become zero; the others are divided by 1 - p.
        seed: a whole number, or a tensor of one, the same on all ranks.
        first_head: number of the first head of queries among all heads.
    """

    p: float
    seed: Any
    first_head: int = 0

    def factors(
        self, shape: torch.Size, rows: tuple[int, int], keys: tuple[int, int], like: torch.Tensor
    ) -> torch.Tensor:
        """The factors by which dropout multiplies weights.

        Args:
            shape: (batch, key heads, queries of one key head): of what the weights belong to.
            rows, keys: positions in the whole sequence.
            like: has dtype and device of the weights.

        Returns:
            (batch, key heads, queries of one key head, rows, keys).
        """
        device = like.device
        batch, key_heads, each = shape
        seed = torch.as_tensor(self.seed, device=device)
        mixed = seed * _MIX[0] + torch.arange(batch, device=device)[:, None, None] * _MIX[1]
        heads = torch.arange(self.first_head, self.first_head + key_heads * each, device=device)
        of_heads = _scrambled(mixed + heads.view(key_heads, each) * _MIX[2])
        of_rows = _scrambled(of_heads[..., None] + torch.arange(*rows, device=device) * _MIX[3])
        numbers = _scrambled(of_rows[..., None] + torch.arange(*keys, device=device) * _MIX[4])
        kept = (numbers & _POSITIVE) >= math.ceil(self.p * (_POSITIVE + 1))
        return kept.to(like.dtype) / (1.0 - self.p)


_POSITIVE = 2**31 - 1
_MIX = (0x9E3779B97F4A7C1, 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x27BB2EE687B0B0FD)


def _scrambled(x: torch.Tensor) -> torch.Tensor:
    """Neighbouring 64-bit numbers become unlike each other (multiplication wraps around; two rounds of SplitMix64)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def check_visible(name: str, window: Any, dropout_p: Any) -> None:
    """Raise unless `window` and `dropout_p` can be what they are named."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ActivationArgumentError(f"{name}: window: got {window!r}, expected a whole number >= 1, or None")
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise ActivationArgumentError(f"{name}: dropout_p: got {dropout_p!r}, expected a number in [0, 1)")
