"""Divides kept inputs among the model-parallel ranks: each rank keeps one slice, and all gather the slices to
recompute.

Model-parallel ranks compute the same activations between their sliced layers, so that one copy among them is enough.
The first inputs that are divided are compared between the ranks, because an input that differs would silently become a
mixture.
"""

from __future__ import annotations

from typing import Any

import dsx_comm
import torch

from .errors import ActivationStateError

__all__ = ["Divided"]

COMPARED = 32
"""The first inputs that are divided are compared over the ranks: so many. Later ones are assumed to be equal."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Divided:
    """Slices of flat tensors over the ranks of one group.

    Args:
        group: their process group.
        rank, size: this rank's place in it, and its size.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size
        self._to_compare = COMPARED if size > 1 else 0

    def takes(self, tensor: torch.Tensor) -> bool:
        """Can the tensor be divided: does it hold floating-point numbers, at least one per rank?"""
        return tensor.is_floating_point() and tensor.numel() >= self.size

    def slice(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a flat tensor, as a copy of ceil(numel / ranks) elements; the last ones are padded with
        zeros. Collective for the first `COMPARED` calls.

        Raises:
            ActivationStateError: the tensor is not the same on all ranks.
        """
        if self._to_compare:
            self._to_compare -= 1
            self._compare(flat)
        length = -(-flat.numel() // self.size)
        start = min(self.rank * length, flat.numel())
        own = flat[start : start + length]
        if own.numel() == length:
            return own.clone()
        padded = flat.new_zeros(length)
        padded[: own.numel()] = own
        return padded

    def join(self, piece: torch.Tensor, numel: int) -> torch.Tensor:
        """The flat tensor of `numel` elements from every rank's slice, in new memory. Collective."""
        if self.size == 1:
            return piece.clone()
        whole = piece.new_empty(piece.numel() * self.size)
        dsx_comm.all_gather_into_tensor(whole, piece, group=self._group)
        return whole[:numel]

    def _compare(self, flat: torch.Tensor) -> None:
        mine = torch.stack([
            flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64),
            torch.tensor(flat.numel(), device=flat.device),
        ])  # fmt: skip
        found = mine.new_empty(self.size * 2)
        dsx_comm.all_gather_into_tensor(found, mine, group=self._group)
        differing = [rank for rank in range(self.size) if not torch.equal(found[2 * rank : 2 * rank + 2], mine)]
        if differing:
            raise ActivationStateError(
                f"partition_activations: an input of checkpoint(), {flat.numel()} elements of {flat.dtype}, is not the"
                f" same on the model-parallel ranks (rank {self.rank} of {self.size} differs from {differing}); each"
                " keeps a slice of it, so that the whole could not be put together again. Give such a tensor the"
                " attribute no_checkpointing = True, or call partition_activations_in_checkpoint(False)"
            )
