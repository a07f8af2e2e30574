"""gloo groups whose ranks connect when they first have something to say to each other.

gloo connects all pairs of ranks when a group is made: N - 1 sockets of each rank for each group, and 2 N requests of
each rank to the store, of answers that grow with N. Of a thousand ranks a rank talks to twenty. From `MANY_RANKS` on
gloo's own way of connecting pairs on their first message is used. It then needs only the other side's address, which it
would ask the job's store for, in the middle of a step and maybe while another thread waits in that store. So the ranks
exchange all addresses when they make the group, and gloo finds them in a store in this process' memory.

They exchange them over the host part of the default group, where gloo carries it: no request to the store, and no
socket that is not there. The default group itself, and groups beside one without gloo, leave their addresses in the
store: up to `WHOLE_TABLE` ranks read all of them there, more read those of the ceil(log2 N) ranks that they hear from
and send to, and get the rest over these connections.

A group below `MANY_RANKS` is torch's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from .doubling import Start, Started, fill_in_rounds, rounds
from .errors import CommError
from .meeting import fresh_prefix

__all__ = ["MANY_RANKS", "NAME", "gloo_group", "host_backend", "make_group", "register"]

NAME = "gloo_on_demand"
MANY_RANKS = 32
"""From this number of ranks on connections are made on demand."""
WHOLE_TABLE = 64
"""Up to this number of ranks each reads all addresses in the store: N requests of N addresses."""
_SLOT = 512  # bytes of a rank's addresses, one per network interface; gloo's have 216 at most
_TAG = 0x40000006  # beyond what users may take


def host_backend(ranks: int) -> str:
    """The name of the backend for a group of so many ranks that carries host tensors, whatever the machines."""
    return NAME if ranks >= MANY_RANKS else "gloo"


def register() -> None:
    """Make the backend known to torch; a second call does nothing."""
    if dist.is_available() and dist.is_gloo_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, make_group, extended_api=True, devices=["cpu"])


def make_group(described: Any, options: Any = None) -> Any:
    """The group that torch asked for (collective)."""
    ranks = list(described.global_ranks_in_group) or list(range(described.group_size))
    made = gloo_group(described.store, described.group_rank, described.group_size, described.timeout, ranks)
    made.options.global_ranks_in_group = described.global_ranks_in_group
    made.options.group_name = described.group_id
    return made


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = ()) -> Any:
    """A gloo group that meets in `store` (collective). gloo would take an earlier group's addresses for those of this
    one.

    Args:
        store: of the ranks of this group alone.
        rank, size, timeout: of the group.
        ranks: the default group's ranks of the members.
    """
    gloo: Any = dist.ProcessGroupGloo
    if size < MANY_RANKS:
        return gloo(_meeting(store, rank), rank, size, timeout=timeout)
    addresses = HashStore()
    made = gloo(addresses, rank, size, _options(gloo, timeout))
    devices = len(made.options._devices)
    mine = _packed([addresses.get(f"{device}/{rank}") for device in range(devices)])
    through = _default_gloo() if ranks else None
    if through is not None:
        table = _over(partial(_start, through, ranks), mine, rank, size)
    else:
        known = _from_store(_meeting(store, rank), mine, rank, size, timeout)
        for other, found in known.items():
            _enter(addresses, other, found)
        table = known if size <= WHOLE_TABLE else _over(partial(_start, made, range(size)), mine, rank, size)
    for other in range(size):
        if other != rank:
            _enter(addresses, other, table[other])
    return made


def _meeting(store: Any, rank: int) -> Any:
    return PrefixStore(fresh_prefix(store, "gloo", rank), store)


def _options(gloo: Any, timeout: timedelta) -> Any:
    """The options of torch, with devices that connect pairs on their first message."""
    options = gloo._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    made = [gloo.create_device(interface=name, lazy_init=True) for name in names]
    options._devices = made or [gloo.create_default_device(lazy_init=True)]
    options._timeout, options._threads = timeout, 2 * len(options._devices)
    return options


def _default_gloo() -> Any:
    """The gloo backend that carries host tensors of the default group; None if there is none."""
    if not dist.is_initialized():
        return None
    world: Any = dist.group.WORLD
    try:
        backend = world._get_backend(torch.device("cpu"))
    except RuntimeError:  # the group carries none
        return None
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def _start(backend: Any, ranks: Sequence[int], tensor: torch.Tensor, peer: int, sending: bool) -> Started:
    return (backend.send if sending else backend.recv)([tensor], ranks[peer], _TAG)


def _over(start: Start, mine: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The addresses of all ranks [N, s], over messages."""
    table = torch.empty(size, len(mine), dtype=torch.uint8, device="cpu")
    fill_in_rounds(table, mine, rank, size, start, connected=False)
    return table


def _from_store(meeting: Any, mine: torch.Tensor, rank: int, size: int, timeout: timedelta) -> dict[int, torch.Tensor]:
    """Leave this rank's addresses in the store, and read those of all other ranks, or of many only those with which
    this rank speaks in `_over`: three requests.
    """
    meeting.set(str(rank), _bytes(mine))
    near = [sign * distance for distance, _ in rounds(size) for sign in (1, -1)]
    others = sorted({(rank + distance) % size for distance in (range(size) if size <= WHOLE_TABLE else near)} - {rank})
    keys = [str(other) for other in others]
    meeting.wait(keys, timeout)
    found = meeting.multi_get(keys) if meeting.has_extended_api() else [meeting.get(key) for key in keys]
    return {other: torch.frombuffer(bytearray(data), dtype=torch.uint8) for other, data in zip(others, found)}


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


def _packed(addresses: list[bytes]) -> torch.Tensor:
    """Addresses on each device, in as many bytes on all ranks: their length, and what is left of `_SLOT` as zeros."""
    longest = max(map(len, addresses))
    if longest > _SLOT - 2:
        raise CommError(f"gloo's address of this rank has {longest} bytes, expected at most {_SLOT - 2}")
    slots = [len(found).to_bytes(2, "little") + found.ljust(_SLOT - 2, b"\0") for found in addresses]
    return torch.frombuffer(bytearray(b"".join(slots)), dtype=torch.uint8)


def _enter(addresses: Any, rank: int, packed: torch.Tensor) -> None:
    """Put a rank's addresses where gloo looks for them."""
    data = _bytes(packed)
    for device, begin in enumerate(range(0, len(data), _SLOT)):
        length = int.from_bytes(data[begin : begin + 2], "little")
        addresses.set(f"{device}/{rank}", data[begin + 2 : begin + 2 + length])
