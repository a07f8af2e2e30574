"""`empty`: a tensor in memory that all ranks of the host can address, where the group has such memory.

On groups of the "dsx" backend it lies in memory shared by the ranks: gathers read the peers' shards straight into their
destination, reductions sum the peers' tensors where they lie. On CUDA it comes from torch's symmetric memory, where all
ranks can have that: on one machine, with devices that reach each other's memory. Elsewhere it is an ordinary tensor,
and collectives work all the same.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .errors import CommArgumentError
from .groups import Membership, member
from .objects import all_gather_object
from .shm.memory import allocate
from .shm.process_group import ShmProcessGroup

_log = logging.getLogger(__name__)

_DEVICES = ("cuda",)  # that torch has symmetric memory for
_ON_DEVICE: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The name of the group whose ranks share a storage on their devices, by storage."""


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    group: Any = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """An uninitialised tensor of `size`, the same on every rank of the group, in symmetric memory where there is some.

    Collective: all ranks of the group call it, in the same order, with the same size. Views of the result stay
    symmetric. It helps where all ranks pass views of one such tensor, at any offsets; otherwise the collective is as
    with ordinary memory. Do not write to the tensor between issuing a collective on it and the end of its wait: other
    ranks read it meanwhile.

    Args:
        size: as for torch.empty.
        dtype: default torch's default dtype.
        group: None for the default group.
        device: of the tensor. Where the ranks' devices cannot share memory, all ranks get an ordinary tensor, and the
            log says why (`is_symmetric` tells which it is).

    Raises:
        CommArgumentError: a negative size.
        SymmetricMemoryError: the host's memory cannot be had (on all ranks, naming the first that failed).
    """
    shape = shape_of(size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    place = torch.device(device)
    to = member(group)
    if to.size > 1 and place.type == "cpu" and to.shared:
        return allocate(to.group, prod(shape) * dtype.itemsize).view(dtype).view(shape)
    if to.size > 1 and place.type in _DEVICES and prod(shape):
        shared = _on_device(prod(shape), dtype, place, to)
        if shared is not None:
            return shared.view(shape)
    return torch.empty(shape, dtype=dtype, device=place)


def shape_of(size: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape that torch.empty(*size) has. Raises CommArgumentError for a negative size."""
    shape: tuple[int, ...] = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    if any(not isinstance(n, int) or n < 0 for n in shape):
        raise CommArgumentError(f"size: got {shape}, expected whole numbers of at least 0")
    return shape


def is_symmetric(tensor: torch.Tensor, group: Any = None) -> bool:
    """True if `tensor` lies in memory from `empty` or a `SymmetricArena` that the ranks of the group share on this
    host.
    """
    to = member(group)
    if tensor.is_cpu:
        return isinstance(to.group, ShmProcessGroup) and to.group.memories.find(tensor)[0] >= 0
    return _ON_DEVICE.get(tensor.untyped_storage()) == to.group.group_name


def _on_device(numel: int, dtype: torch.dtype, device: torch.device, to: Membership) -> torch.Tensor | None:
    """torch's symmetric memory, or None on all ranks where one cannot have it."""
    tensor, symmetric, problem = None, None, ""
    try:
        from torch.distributed import _symmetric_memory as symmetric

        tensor = symmetric.empty(numel, dtype=dtype, device=device)
    except (ImportError, RuntimeError) as error:  # this torch has none, or not for this device
        problem = str(error)
    if _all_can(problem, to) and symmetric is not None and tensor is not None:
        try:
            symmetric.rendezvous(tensor, to.group.group_name)
        except RuntimeError as error:  # devices that do not reach each other's memory
            problem = str(error)
        if _all_can(problem, to):
            _ON_DEVICE[tensor.untyped_storage()] = to.group.group_name
            return tensor
    return None


def _all_can(problem: str, to: Membership) -> bool:
    """Whether no rank of the group has a problem and all are on one machine; the same answer on all. Collective."""
    answers: list[Any] = [None] * to.size
    all_gather_object(answers, (_machine(), problem), to.group)
    said = [f"rank {rank}: {why}" for rank, (_, why) in zip(to.ranks, answers) if why]
    if len({machine for machine, _ in answers}) > 1:
        said.append("the ranks are on several machines")
    if said and to.rank == 0:
        _log.info("no symmetric memory on the devices, tensors are ordinary ones: %s", said[0].splitlines()[0])
    return not said


def _machine() -> str:
    """An identifier of this machine: its name, which others may share, and the kernel's unique ID of this boot."""
    number = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {number.read_text().strip() if number.exists() else ''}"
