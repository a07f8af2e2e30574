"""Packs and restores the tensors that a checkpoint keeps for its recomputation.

`torch.utils.checkpoint` saves the inputs through autograd's saved-tensor hooks. `Keeper` gives the two functions of a
hook: `pack` moves an input as flat elements into a place, `restore` brings it back with its shape and strides. An input
of several checkpoints (an attention mask) is kept once.

These inputs are not packed: those with `no_checkpointing = True`, parameters, tensor subclasses, and tensors that are
not dense (a mask that was expanded occupies less memory than its elements).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .divided import Divided
from .places import DevicePlace, Held, Place, changed_in_place

__all__ = ["Keeper", "Packed"]


class Packed(Protocol):
    """An input that is kept."""

    def restore(self) -> torch.Tensor:
        """The input as it was."""
        ...


class _AsItIs:
    """The tensor itself. Autograd does not watch tensors behind a hook for in-place changes, so this class does.

    It is detached: a graph that holds its own output is never freed.
    """

    def __init__(self, tensor: torch.Tensor, given: torch.Tensor) -> None:
        self._tensor, self._given, self._version = tensor.detach(), given.detach(), given._version

    def restore(self) -> torch.Tensor:
        if self._given._version != self._version:
            raise changed_in_place(self._tensor.shape)
        return self._tensor


class _Elsewhere:
    """A tensor as flat elements in a place: all of them, or this rank's slice."""

    def __init__(self, tensor: torch.Tensor, divided: Divided | None, place: Place) -> None:
        flat = tensor.detach()
        if _is_dense(tensor):
            flat, self._stride = flat.as_strided((tensor.numel(),), (1,)), tensor.stride()
        else:
            flat = flat.contiguous()
            flat, self._stride = flat.view(-1), flat.stride()
        self._shape, self._divided = tensor.shape, divided
        self._held: Held = place.put(flat if divided is None else divided.slice(flat))

    def restore(self) -> torch.Tensor:
        flat = self._held.get()
        if self._divided is not None:
            flat = self._divided.join(flat, self._shape.numel())
        return flat.as_strided(self._shape, self._stride)


class Keeper:
    """Packs the inputs of checkpoints.

    Args:
        divided: how inputs are divided among ranks; None: they are not.
        place: where they (or the slices) lie.
    """

    def __init__(self, divided: Divided | None, place: Place) -> None:
        self._divided, self.place = divided, place
        self._kept: weakref.WeakValueDictionary[int, _Elsewhere] = weakref.WeakValueDictionary()
        self._given: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    @property
    def plain(self) -> bool:
        """Does every input stay as it is?"""
        return self._divided is None and isinstance(self.place, DevicePlace)

    @contextmanager
    def keeping(self, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside the context autograd's hooks pack these inputs of one checkpoint. A hook sees another tensor object
        over the same memory, so inputs are recognised by their memory. Other saved tensors are not packed.
        """
        self.place.begin()
        by_memory = {_memory(tensor): tensor for tensor in inputs if _memory(tensor) is not None}

        def pack(tensor: torch.Tensor) -> Packed:
            given = by_memory.get(_memory(tensor))
            return _AsItIs(tensor, tensor) if given is None else self._pack(tensor, given)

        try:
            with saved_tensors_hooks(pack, _restore):
                yield
        finally:
            by_memory.clear()  # autograd keeps `pack` as long as the graph

    def _pack(self, tensor: torch.Tensor, given: torch.Tensor) -> Packed:
        divided = self._divided if self._divided is not None and self._divided.takes(given) else None
        if not _may_move(given) or (divided is None and not self.place.moves(given)):
            return _AsItIs(tensor, given)
        known, packed = self._given.get(id(given)), self._kept.get(id(given))
        if packed is not None and known is not None and known[0]() is given and known[1] == given._version:
            return packed
        packed = _Elsewhere(given, divided, self.place)
        self._kept[id(given)] = packed
        self._given[id(given)] = (weakref.ref(given), given._version)
        if len(self._given) > 2 * len(self._kept) + 64:
            self._given = {key: found for key, found in self._given.items() if key in self._kept}
        return packed


def _restore(packed: Packed) -> torch.Tensor:
    return packed.restore()


def _memory(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensor objects over the same elements; None for subclasses, which may have no memory."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _may_move(given: torch.Tensor) -> bool:
    if type(given) is not torch.Tensor or getattr(given, "no_checkpointing", False) or not given.numel():
        return False
    occupied = given.untyped_storage().nbytes() // given.element_size()
    return _is_dense(given) or given.numel() <= occupied


def _is_dense(tensor: torch.Tensor) -> bool:
    """Do the elements fill a range of memory without gaps, in any order?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
