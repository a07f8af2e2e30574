"""Tables of numbers as few bytes: what ranks of a large job tell of their shares.

A row of such a table differs from the row before it mostly by what the rows before differ by (the same places in one
block of the model after the other). So the columns are written one after the other, each as differences, which are then
mostly equal and are packed to almost nothing (`dsx_comm.object_tree`).
"""

from __future__ import annotations

import operator
from array import array
from itertools import accumulate, chain

__all__ = ["from_bytes", "to_bytes"]


def to_bytes(rows: array[int], width: int) -> bytes:
    """Rows of `width` numbers, one after the other, of which each fits into 62 bits."""
    found = array("q")
    for column in range(width):
        values = rows[column::width]
        found.extend(map(operator.sub, values, chain((0,), values)))
    return found.tobytes()


def from_bytes(data: bytes, width: int) -> array[int]:
    """The rows."""
    differences = array("q")
    differences.frombytes(data)
    length = len(differences) // width
    rows = array("q", bytes(len(data)))
    for column in range(width):
        rows[column::width] = array("q", accumulate(differences[column * length : (column + 1) * length]))
    return rows
