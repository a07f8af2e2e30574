"""Groups and ranks: torch's process groups, with errors that say what is missing.

`Membership` holds what this process knows of a group: its size, this rank in it, which backend serves a device. It is
worked out once per group and found again by every call. None means the default group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from dsx_core.device import Device

from .agreement import AGREEMENT
from .dropped import DROPPED
from .errors import CommArgumentError, CommError
from .hang import WATCH
from .on_demand import MANY_RANKS
from .on_demand import NAME as ON_DEMAND
from .shm.process_group import ShmProcessGroup
from .shm.segment import ShmOptions

_WORLD = dist.distributed_c10d._world
REHEARSAL = "rehearsal"
"""The backend of groups whose other ranks are not there (`rehearsal.py`)."""
_AVERAGES = ("nccl", "xccl", "hccl", "dsx", REHEARSAL)


class Membership:
    """A resolved group. It does not keep the group alive.

    Attributes:
        rank: this process' rank in the group.
        size: number of ranks.
        ranks: global rank of each member, in the group's order.
        backends: backend name by device type.
        averages_on: device types whose backend itself knows AVG.
        shared: whether the group lies in shared memory; its synchronous calls need no handle.
        has_met: the ranks that speak in `all_gather_in_rounds` are connected, see `on_demand`.
    """

    __slots__ = (
        "_composes",
        "_group",
        "averages_on",
        "backends",
        "config",
        "has_met",
        "rank",
        "ranks",
        "shared",
        "size",
    )

    def __init__(self, group: Any, backends: dict[str, str], config: Any) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)
        self.backends, self.config = backends, config
        self.shared = isinstance(group, ShmProcessGroup)
        self._group = ref(group)
        self._composes = backends.get("cpu") == "gloo"
        self.has_met = self.size < MANY_RANKS
        self.averages_on = frozenset(device for device, backend in backends.items() if backend in _AVERAGES)

    @property
    def group(self) -> Any:
        """torch's process group."""
        return self._group()

    @property
    def message_device(self) -> torch.device:
        """The device of small messages of bytes: the host, unless the group carries memory of the accelerator alone."""
        kind = "cpu" if "cpu" in self.backends else next(iter(self.backends))
        return Device.of(kind).torch_device

    @property
    def composes_on_host(self) -> bool:
        """Whether operations on host tensors are composed of sends and receives, because gloo carries them."""
        return self._composes

    def composes(self, tensor: torch.Tensor) -> bool:
        """True where operations are composed of sends and receives: gloo on host tensors (`composed.py`)."""
        return self._composes and tensor.is_cpu

    def averages(self, tensor: torch.Tensor) -> bool:
        """True where the backend itself knows AVG."""
        return tensor.device.type in self.averages_on


class _Known:
    """The groups that calls were made in, and those that this process has from before a fork."""

    def __init__(self) -> None:
        self.members: WeakKeyDictionary[Any, Membership] = WeakKeyDictionary()
        self.inherited: WeakSet[Any] = WeakSet()
        self.parent = 0

    def forked(self) -> None:
        """This is a child of the process: the places in the groups that it inherits are its parent's."""
        self.members = WeakKeyDictionary()
        self.inherited = WeakSet(_WORLD.pg_map)
        self.parent = os.getppid()


_KNOWN = _Known()
os.register_at_fork(after_in_child=_KNOWN.forked)


def member(group: Any = None) -> Membership:
    """Resolve a group argument.

    Raises:
        CommError: there is no process group yet, or it is that of the process this one was forked from.
        CommArgumentError: this rank is not a member of the group.
    """
    if group is None:
        group = dist.group.WORLD
    try:
        known = _KNOWN.members.get(group)
    except TypeError:  # None, or something else that is no group
        known = None
    # a group that was destroyed, by torch's function too, has no configuration any more
    if known is not None and known.config is _WORLD.pg_backend_config.get(group):
        return known
    return _resolve(group)


def _resolve(group: Any) -> Membership:
    _need_initialized()
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        raise CommArgumentError(
            f"rank {dist.get_rank()} is not a member of the group it was asked to communicate in; "
            "guard the call with `rank in dsx_comm.get_all_ranks_from_group(...)` or use the ranks' own group"
        )
    _need_group(group)
    if group in _KNOWN.inherited:
        raise CommError(
            f"process {os.getpid()} was forked from process {_KNOWN.parent}, which is rank {dist.get_rank()}: it "
            "cannot take that rank's place in a group. Communicate in the parent, or start processes with the method "
            "'spawn'"
        )
    config = _WORLD.pg_backend_config.get(group)
    if config is None:
        raise CommArgumentError("the group is not known to torch.distributed: it was destroyed")
    backends = _backends(str(config))
    if backends.get("cpu") == "dsx" and not isinstance(group, ShmProcessGroup):
        backends = {**backends, "cpu": "gloo"}  # the ranks share no memory
    if backends.get("cpu") == ON_DEMAND:
        backends = {**backends, "cpu": "gloo"}
    membership = _KNOWN.members[group] = Membership(group, backends, config)
    return membership


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


def _need_group(group: Any) -> None:
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER  # what torch gives to ranks that are not in a new group
    if not (group is None or isinstance(group, dist.ProcessGroup) or group == outside):
        raise CommArgumentError(f"group: got {type(group).__name__}, expected a process group or None")


def get_rank(group: Any = None) -> int:
    """This process' rank in the group; -1 if it is not a member. Raises `CommArgumentError` for what is no group."""
    _need_initialized()
    _need_group(group)
    return dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """Number of ranks in the group; -1 if this process is not a member. Raises `CommArgumentError` for what is no
    group.
    """
    _need_initialized()
    _need_group(group)
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """This process' rank on its machine: LOCAL_RANK, which launchers and `init_distributed` set. Raises `CommError`
    where it is not set.
    """
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
    return list(member(group).ranks)


def get_backend(group: Any = None) -> str:
    """The backend name of a group. Where `init_process_group` was given none, that of the device that torch chose:
    torch itself says "undefined" there.
    """
    _need_initialized()
    found = dist.get_backend(group)
    if found != "undefined":
        return found
    chosen = dist.get_backend_config(group)
    kinds = set(_backends(chosen).values())
    return kinds.pop() if len(kinds) == 1 else chosen


def backend_for(device_type: str, group: Any = None) -> str:
    """The name of the backend that carries tensors of one kind of device in a group ("nccl" of "cpu:gloo,cuda:nccl"):
    for a further group that carries these alone, and makes no connections for others. The whole name where the group
    has one backend, or none for the device.
    """
    whole = get_backend(group)
    return _backends(whole).get(device_type, whole) if ":" in whole else whole


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    *,
    description: str | None = None,
    local: bool = False,
    options: ShmOptions | None = None,
) -> Any:
    """Make a group of `ranks` (None: all). Every rank of the default group must call it, in the same order.

    Args:
        ranks: global ranks; their order is kept.
        timeout: of the group's calls; None: that of the default group.
        backend: None: that of the default group.
        description: torch's `group_desc`.
        local: only the members call it, so that disjoint sets of ranks may make theirs at the same time.
        options: sizes and habits of a group of the "dsx" backend (torch's `pg_options`); other groups have none.

    Returns:
        The group, or `GroupMember.NON_GROUP_MEMBER` on ranks that are not in it.

    Raises:
        CommError: there is no default group.
        CommArgumentError: ranks that do not exist, or twice the same.
    """
    _need_initialized()
    if ranks is not None:
        world = dist.get_world_size()
        ranks = list(ranks)
        wrong = [r for r in ranks if not 0 <= r < world]
        if wrong or len(set(ranks)) != len(ranks) or not ranks:
            raise CommArgumentError(f"ranks: got {ranks}, expected distinct ranks in [0, {world}), at least one")
    default = get_backend()
    if default == REHEARSAL:
        backend = REHEARSAL  # whatever transport is asked for, nothing is sent
    shared = "dsx" in (backend or default)
    with _no_bound_device() if shared or local else nullcontext():
        # torch sorts unless told not to, and a group's order decides who owns which shard
        return dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=options if shared else None,
            group_desc=description,
            sort_ranks=False,
            use_local_synchronization=local,
        )


@contextmanager
def _no_bound_device() -> Iterator[None]:
    """Hide from torch the device that `init_process_group(device_id=...)` was given, while a group is made.

    torch asks the new group for the backend of that device, and a group in host memory has none. And it would split the
    communicator of all ranks, a collective of all of them, also where only the members of the group make it.
    """
    world = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def destroy_process_group(group: Any = None) -> None:
    """Destroy a group (None: the default group and with it everything; if there is none, nothing is done).

    Calls whose handles were dropped are finished first.

    Raises CommArgumentError for a group that was destroyed before.
    """
    if not is_initialized():
        if group is None:
            return
        raise CommArgumentError("the group was destroyed before, with the default group")
    DROPPED.finish()
    if group is None or group is dist.group.WORLD:
        WATCH.rest()
        AGREEMENT.forget()
    elif isinstance(group, dist.ProcessGroup) and group not in _WORLD.pg_map:
        raise CommArgumentError("the group was destroyed before")
    dist.destroy_process_group(group)


def initialize_mesh_device(
    mesh_shape: Sequence[int], mesh_dim_names: Sequence[str], device_type: str | None = None
) -> Any:
    """A torch DeviceMesh over the ranks in order; the last axis varies fastest.

    Args:
        mesh_shape: ranks along each axis; their product is the world size.
        mesh_dim_names: a name for each axis.
        device_type: default: "cuda" where CUDA is available and the default group serves it, else "cpu".

    Raises:
        CommArgumentError: another product, or another number of names.
        CommError: there is no process group.
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
        raise CommError("there is no process group: call dsx_comm.init_distributed() first", code="DSX204")
