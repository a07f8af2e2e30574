"""A permutation that is computed place by place, for data sets whose order would not fit in memory.

A Feistel network over the bits of a place: rounds in turn change the lower half of the bits by a hash of the upper half
and the other way round. Each round can be undone, so the network is a permutation of [0, 2^bits). Places that come out
at `length` or above are sent through again until they fall below it (cycle walking): that leaves a permutation of
[0, length). As 2^bits is less than twice `length`, a place is computed less than twice on average.
"""

from __future__ import annotations

import numpy as np

from ..randomness import mixed

__all__ = ["KeyedPermutation"]

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # those of the generator splitmix64


class KeyedPermutation:
    """A permutation of [0, `length`) that `key` decides. It is the same on every rank and machine and holds no table.

    Args:
        length: how many numbers, at least 1.
        key: integers; another key gives another permutation.
    """

    def __init__(self, length: int, *key: int) -> None:
        self._length = length
        bits = max((length - 1).bit_length(), 2)
        self._low = np.uint64(bits // 2)
        self._masks = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
        self._keys = [np.uint64(mixed((*key, number))) for number in range(_ROUNDS)]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """The numbers at `places`: int64 of any shape, each place in [0, length)."""
        numbers = self._pass(places.astype(np.uint64))
        while (outside := numbers >= self._length).any():
            numbers[outside] = self._pass(numbers[outside])
        return numbers.astype(np.int64)

    def _pass(self, places: np.ndarray) -> np.ndarray:
        low, high = places & self._masks[0], places >> self._low
        for number, key in enumerate(self._keys):
            if number % 2:
                high ^= _hashed(low, key) & self._masks[1]
            else:
                low ^= _hashed(high, key) & self._masks[0]
        return high << self._low | low


def _hashed(numbers: np.ndarray, key: np.uint64) -> np.ndarray:
    """64 bits for each number, all of which depend on all bits of the number and of the key."""
    hashed = numbers ^ key
    for shift, multiplier in zip((30, 27), _MULTIPLIERS):
        hashed ^= hashed >> np.uint64(shift)
        hashed *= multiplier
    return hashed ^ hashed >> np.uint64(31)
