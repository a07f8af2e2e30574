"""Do all ranks say the same? The answer from sums over the ranks, which an all-reduce gives with the norm's own sum.

A rank says a row of numbers: how often it declines (0 or 1), and for each 16 bits of its values the number and its
square. By the inequality of Cauchy and Schwarz the sum of n numbers has a square of at most n times the sum of their
squares, and both are equal only where all numbers are. The sums are exact in fp64 for up to 2^21 ranks.

Left out: what a rank says (`agreed`), and how rows are added up (`protocol.RowSum`).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["all_say_the_same", "declining_row", "row_of"]

_BITS = 16
_VALUE_BITS = 64


def row_of(values: Sequence[int]) -> tuple[float, ...]:
    """The row of a rank that says `values`, which are below 2^64 and not negative."""
    mask = (1 << _BITS) - 1
    pieces = [(value >> shift) & mask for value in values for shift in range(0, _VALUE_BITS, _BITS)]
    return (0.0, *map(float, pieces), *(float(piece * piece) for piece in pieces))


def declining_row(values: int) -> tuple[float, ...]:
    """The row of a rank that does not say its values, where the others say so many."""
    return (1.0, *[0.0] * (2 * values * (_VALUE_BITS // _BITS)))


def all_say_the_same(sums: Sequence[float], ranks: int) -> bool:
    """Whether no rank declines and all say the same values, from the sums of the rows of all ranks."""
    pieces = (len(sums) - 1) // 2
    numbers, squares = sums[1 : 1 + pieces], sums[1 + pieces :]
    return sums[0] == 0.0 and all(int(n) ** 2 == ranks * int(s) for n, s in zip(numbers, squares, strict=True))
