"""Tells autograd about writes that go past it.

A compiled kernel gets an address and writes there. Autograd learns of writes by the version of a tensor: a graph that
saved the old values compares versions in backward, and raises. So code that hands out addresses to be written calls one
of these functions once per call (without it, a backward through such a graph runs and gives wrong
gradients). Operators of `torch.ops.dsx_ops` need not: `library.operator` does it for all arguments that their schema
marks as written. Tensors made in inference mode have no version; torch leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import increment_version

from .spec import Slot


def wrote(tensors: Iterable[Tensor]) -> None:
    """A kernel has written (on CUDA: will have written, in the order of the stream) to these tensors."""
    increment_version(list(tensors))


def wrote_slots(slots: Iterable[Slot], *, params: bool = True, states: bool = True) -> None:
    """An update has written to the slots: `params` with their low bits and copies, `states` with their scales."""
    wrote(t for slot in slots for part in _with_owner(slot) for t in _written(part, params, states))


def _with_owner(slot: Slot) -> Iterator[Slot]:
    yield slot
    if slot.owner is not None:
        yield from _with_owner(slot.owner)


def _written(slot: Slot, params: bool, states: bool) -> Iterator[Tensor]:
    if params:
        yield slot.param
        if slot.low_bits is not None:
            yield slot.low_bits
        if slot.copy is not None:
            yield slot.copy
    if states:
        yield from slot.states
        yield from slot.scales
