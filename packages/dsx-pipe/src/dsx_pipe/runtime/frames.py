"""The first part of a message between two ranks: a header, and behind it the tensors, if they are few bytes.

A message would otherwise be two, the header and then the tensors, and a stage that waits for its input would wait for
both, one after the other. So once a sender and a receiver know the structure of what goes to a stage, each message
there begins with a frame of one size: the header of eight whole numbers, then each tensor at a multiple of 64 bytes.
Larger tensors are sent as they lie, because copying them into a frame would take longer than a second message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from .structure import TensorSpec

NUMBERS = 8  # of a header
_HEADER = 8 * NUMBERS  # bytes
_ALIGNMENT = 64  # bytes
_MOST = 1 << 20
"""Bytes of tensors that a frame takes. Copying a MiB takes about 0.1 ms, as long as it takes to wake a rank."""


@dataclass(frozen=True)
class Frame:
    """The layout of the frames of one channel.

    Attributes:
        nbytes: size of a frame.
        places: (first byte, last byte) of each tensor in it; None: the tensors are sent apart.
    """

    nbytes: int = _HEADER
    places: tuple[tuple[int, int], ...] | None = None

    @staticmethod
    def of(tensors: Sequence[TensorSpec]) -> Frame:
        """The layout for tensors of these kinds."""
        places, end = [], _HEADER
        for one in tensors:
            size = prod(one.shape) * one.dtype.itemsize
            places.append((end, end + size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return Frame() if end - _HEADER > _MOST else Frame(end, tuple(places))

    def empty(self) -> torch.Tensor:
        """Memory for a frame: int64 [8] where it is a header alone, else uint8 [nbytes]."""
        if self.places is None:
            return torch.zeros(NUMBERS, dtype=torch.int64, device="cpu")
        return torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")

    def write(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A frame. `tensors` are those of the layout, or none: then their bytes mean nothing."""
        header = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if self.places is None:
            return header
        whole = self.empty()
        whole[:_HEADER].copy_(header.view(torch.uint8))
        for (begin, end), tensor in zip(self.places, tensors):
            if end > begin:
                whole[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return whole

    def numbers(self, whole: torch.Tensor) -> list[int]:
        """The header of a frame."""
        return whole.tolist() if self.places is None else whole[:_HEADER].view(torch.int64).tolist()

    def read(self, whole: torch.Tensor, tensors: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """The tensors of a frame, in its memory. Each has a version counter of its own (`.data`), so that a stage may
        write to one of them while autograd keeps another.
        """
        return [
            whole[begin:end].view(one.dtype).view(one.shape).data
            for (begin, end), one in zip(self.places or (), tensors)
        ]
