"""`empty`: a tensor in memory that all ranks of the host can address, where the group has such memory.

On groups of the "dsx" backend it lies in memory shared by the ranks: gathers read the peers' shards straight into their
destination, reductions sum the peers' tensors where they lie. On CUDA it comes from torch's symmetric memory where this torch
has that for the group's devices. Anywhere else it is an ordinary tensor, and everything works as without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from .errors import CommArgumentError
from .groups import member
from .shm.memory import allocate
from .shm.process_group import ShmProcessGroup


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    group: Any = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """An uninitialised tensor of `size`, the same on every rank of the group, in symmetric memory where there is some.

    Collective: all ranks of the group call it, in the same order, with the same size. Views of the result stay symmetric. It
    helps where all ranks pass views of one such tensor, at any offsets; otherwise the collective is as with ordinary memory. Do
    not write to the tensor between issuing a collective on it and the end of its wait: other ranks read it meanwhile.

    Args:
        size: as for torch.empty.
        dtype: default torch's default dtype.
        group: None for the default group.
        device: of the tensor.

    Raises:
        CommArgumentError: a negative size.
        SymmetricMemoryError: the memory cannot be had (on all ranks, naming the first that failed).
    """
    shape = shape_of(size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    place = torch.device(device)
    to = member(group)
    shares = place.type == "cuda" or (place.type == "cpu" and isinstance(to.group, ShmProcessGroup))
    if not shares or to.size == 1:
        return torch.empty(shape, dtype=dtype, device=place)
    if place.type == "cuda":
        return _on_cuda(shape, dtype, place, to.group)
    return allocate(to.group, prod(shape) * dtype.itemsize).view(dtype).view(shape)


def shape_of(size: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape that torch.empty(*size) has. Raises CommArgumentError for a negative size."""
    shape: tuple[int, ...] = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    if any(not isinstance(n, int) or n < 0 for n in shape):
        raise CommArgumentError(f"size: got {shape}, expected whole numbers of at least 0")
    return shape


def is_symmetric(tensor: torch.Tensor, group: Any = None) -> bool:
    """True if `tensor` lies in memory from `empty` or a `SymmetricArena` that the ranks of the group share on this host."""
    to = member(group)
    return isinstance(to.group, ShmProcessGroup) and to.group.memories.find(tensor)[0] >= 0


def _on_cuda(shape: Any, dtype: torch.dtype, device: torch.device, group: Any) -> torch.Tensor:
    try:
        from torch.distributed import _symmetric_memory as symmetric
    except ImportError:  # this torch has none
        return torch.empty(shape, dtype=dtype, device=device)
    tensor = symmetric.empty(*shape, dtype=dtype, device=device)
    symmetric.rendezvous(tensor, group.group_name)
    return tensor
