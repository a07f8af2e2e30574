"""Groups and ranks: torch's process groups, with errors that say what is missing.

`Membership` resolves a group argument once per call: the group, its size, this rank in it, and which backend serves a
device. None means the default group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from .agreement import AGREEMENT
from .errors import CommArgumentError, CommError
from .hang import WATCH
from .shm.process_group import ShmProcessGroup


@dataclass(frozen=True)
class Membership:
    """A resolved group: `rank` and `size` are of the group, `backends` maps a device type to a backend name."""

    group: Any
    rank: int
    size: int
    backends: dict[str, str]

    def composes(self, tensor: torch.Tensor) -> bool:
        """True where operations are composed of sends and receives: gloo on host tensors (`composed.py`)."""
        return tensor.device.type == "cpu" and self.backends.get("cpu") == "gloo"

    def averages(self, tensor: torch.Tensor) -> bool:
        """True where the backend itself knows AVG."""
        return self.backends.get(tensor.device.type) in ("nccl", "xccl", "hccl", "dsx")

    @property
    def shared(self) -> bool:
        """True for a group in shared memory, whose synchronous calls need no handle."""
        return isinstance(self.group, ShmProcessGroup)


def member(group: Any = None) -> Membership:
    """Resolve a group argument.

    Raises:
        CommError: there is no process group yet.
        CommArgumentError: this rank is not a member of the group.
    """
    if not is_initialized():
        raise CommError("there is no process group: call dsx_comm.init_distributed() first")
    group = dist.group.WORLD if group is None else group
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        raise CommArgumentError(
            f"rank {dist.get_rank()} is not a member of the group it was asked to communicate in; "
            "guard the call with `rank in dsx_comm.get_all_ranks_from_group(...)` or use the ranks' own group"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise CommArgumentError(f"group: got {type(group).__name__}, expected a process group or None")
    try:
        config = dist.get_backend_config(group)
    except (ValueError, RuntimeError) as error:
        raise CommArgumentError(f"the group is not known to torch.distributed (destroyed?): {error}") from error
    backends = _backends(config)
    if backends.get("cpu") == "dsx" and not isinstance(group, ShmProcessGroup):
        backends = {**backends, "cpu": "gloo"}  # the ranks share no memory
    return Membership(group, group.rank(), group.size(), backends)


@lru_cache(maxsize=64)
def _backends(config: str) -> dict[str, str]:
    """Parse torch's "cpu:gloo,cuda:nccl"."""
    pairs = (item.partition(":") for item in config.split(","))
    return {device: backend for device, _, backend in pairs}


def is_available() -> bool:
    """True if this torch has torch.distributed."""
    return dist.is_available()


def is_initialized() -> bool:
    """True if there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """This process' rank in the group; -1 if it is not a member."""
    _need_initialized()
    return dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """Number of ranks in the group; -1 if this process is not a member."""
    _need_initialized()
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """This process' rank on its machine: LOCAL_RANK, which launchers and `init_distributed` set."""
    value = os.environ.get("LOCAL_RANK")
    if value is None:
        raise CommError("LOCAL_RANK is not set: start with `dsx launch` or torchrun, or call init_distributed() first")
    return int(value)


def get_global_rank(group: Any, group_rank: int) -> int:
    """The default group's rank of rank `group_rank` of `group`."""
    _need_initialized()
    if group is None or group is dist.group.WORLD:
        return group_rank
    return dist.get_global_rank(group, group_rank)


def get_group_rank(group: Any, global_rank: int) -> int:
    """The rank in `group` of the default group's rank `global_rank`."""
    _need_initialized()
    return global_rank if group is None else dist.get_group_rank(group, global_rank)


def get_world_group() -> Any:
    """The default process group."""
    _need_initialized()
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The default group's ranks of the members of `group`, in the group's order."""
    return dist.get_process_group_ranks(member(group).group)


def get_backend(group: Any = None) -> str:
    """The backend name of a group."""
    _need_initialized()
    return dist.get_backend(group)


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    *,
    description: str | None = None,
    local: bool = False,
) -> Any:
    """Make a group of `ranks` (None: all). Every rank of the default group must call it, in the same order; with `local` only
    its members, so that disjoint sets of ranks may make theirs at the same time.

    Returns the group, or `GroupMember.NON_GROUP_MEMBER` on ranks that are not in it. The order of `ranks` is kept.
    """
    _need_initialized()
    if ranks is not None:
        world = dist.get_world_size()
        ranks = list(ranks)
        wrong = [r for r in ranks if not 0 <= r < world]
        if wrong or len(set(ranks)) != len(ranks) or not ranks:
            raise CommArgumentError(f"ranks: got {ranks}, expected distinct ranks in [0, {world}), at least one")
    # torch sorts unless told not to, and a group's order decides who owns which shard
    return dist.new_group(
        ranks,
        timeout=timeout,
        backend=backend,
        group_desc=description,
        sort_ranks=False,
        use_local_synchronization=local,
    )


def destroy_process_group(group: Any = None) -> None:
    """Destroy a group (None: the default group and with it everything)."""
    if group is None or group is dist.group.WORLD:
        WATCH.rest()
        AGREEMENT.forget()
    dist.destroy_process_group(group)


def initialize_mesh_device(
    mesh_shape: Sequence[int], mesh_dim_names: Sequence[str], device_type: str | None = None
) -> Any:
    """A torch DeviceMesh over the ranks in order; the last axis varies fastest.

    `device_type` defaults to "cuda" where CUDA is available and the default group serves it, else "cpu".
    """
    from torch.distributed.device_mesh import init_device_mesh  # half a second of import, rarely used

    shape, names = tuple(mesh_shape), tuple(mesh_dim_names)
    world = get_world_size()
    product = 1
    for extent in shape:
        product *= extent
    if len(shape) != len(names) or product != world:
        raise CommArgumentError(
            f"mesh of shape {shape} with axes {names}: expected one name per axis and a product of {world} (world size)"
        )
    if device_type is None:
        cuda = "cuda" in member().backends and torch.cuda.is_available()
        device_type = "cuda" if cuda else "cpu"
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def _need_initialized() -> None:
    if not is_initialized():
        raise CommError("there is no process group: call dsx_comm.init_distributed() first")
