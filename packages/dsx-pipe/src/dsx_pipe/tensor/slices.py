"""The slice of a tensor that each rank holds: pure arithmetic, and Megatron's attributes of sliced parameters.

A tensor is cut along one dimension into as many pieces as the group has ranks; sizes differ by one at most. A fused
tensor (query, key and value in one weight) is first cut into its `parts`, so that each rank gets a piece of every part.
"""

from __future__ import annotations

import itertools
from typing import Any

import dsx_comm
import torch
from torch import nn

from ..errors import TensorSliceError


def bounds(length: int, size: int) -> list[int]:
    """Starts of the pieces of `size` ranks, followed by `length`: rank r has [bounds[r], bounds[r + 1])."""
    chunk, rest = divmod(length, size)
    return [r * chunk + min(r, rest) for r in range(size + 1)]


def lengths(length: int, size: int) -> list[int]:
    """Length of each rank's piece."""
    return [b - a for a, b in itertools.pairwise(bounds(length, size))]


def check_divides(length: int, size: int, what: str, parts: int = 1) -> None:
    """Raise `TensorSliceError` if `parts` equal parts of a length cannot be cut into `size` equal pieces each."""
    if length % parts or (length // parts) % size:
        each = f" in each of {parts} parts" if parts > 1 else ""
        raise TensorSliceError(f"{what}: got {length}, expected a multiple of the {size} ranks of the group{each}")


def slice_of(tensor: torch.Tensor, dim: int, rank: int, size: int, parts: int = 1) -> torch.Tensor:
    """A rank's piece of a whole tensor, as a contiguous copy.

    Args:
        tensor: the whole tensor.
        dim: dimension along which it is cut.
        rank: index in the group.
        size: number of ranks of the group.
        parts: number of equal parts fused along `dim`; each is cut.
    """
    pieces = []
    for part in tensor.tensor_split(parts, dim):
        cut = bounds(part.shape[dim], size)
        pieces.append(part.narrow(dim, cut[rank], cut[rank + 1] - cut[rank]))
    return torch.cat(pieces, dim).contiguous()


def whole_of(pieces: list[torch.Tensor], dim: int, parts: int = 1) -> torch.Tensor:
    """The whole tensor from all ranks' pieces: the inverse of `slice_of`."""
    cut = [piece.tensor_split(parts, dim) for piece in pieces]
    return torch.cat([torch.cat([one[p] for one in cut], dim) for p in range(parts)], dim)


def mark(parameter: nn.Parameter, dim: int, parts: int = 1) -> nn.Parameter:
    """Mark a parameter as a slice with Megatron's attributes, which engines read for norms and checkpoints.

    `tensor_model_parallel` is True, `partition_dim` the dimension, `partition_stride` the number of fused parts.
    """
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = dim  # type: ignore[attr-defined]
    parameter.partition_stride = parts  # type: ignore[attr-defined]
    return parameter


def is_sliced(parameter: torch.Tensor) -> bool:
    """True if the parameter is a slice of a larger one."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def gather_parameter(parameter: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The whole of a sliced parameter, detached, on every rank of the group (collective).

    A parameter that is not sliced is returned as it is, detached.
    """
    if not is_sliced(parameter):
        return parameter.detach()
    size = dsx_comm.get_world_size(group)
    dim, parts = parameter.partition_dim, parameter.partition_stride  # type: ignore[attr-defined]
    mine = parameter.detach().contiguous()
    shapes: list[Any] = [None] * size
    dsx_comm.all_gather_object(shapes, tuple(mine.shape), group=group)
    largest = max(shape[dim] for shape in shapes)
    padded = mine.new_zeros((*mine.shape[:dim], largest, *mine.shape[dim + 1 :]))
    padded.narrow(dim, 0, mine.shape[dim]).copy_(mine)
    rows = mine.new_empty((size, *padded.shape))
    dsx_comm.all_gather_into_tensor(rows.view(-1), padded.view(-1), group=group)
    return whole_of([rows[r].narrow(dim, 0, shapes[r][dim]) for r in range(size)], dim, parts)


def whole_state(module: nn.Module, group: Any = None) -> dict[str, torch.Tensor]:
    """All parameters by name with their slices joined, as before slicing (collective over the group)."""
    return {name: gather_parameter(p, group) for name, p in module.named_parameters()}
