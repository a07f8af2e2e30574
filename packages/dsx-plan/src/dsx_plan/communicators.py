"""The memory of a device that NCCL's communicators take, for the process groups over which tensors go.

NCCL gives every connection of every channel a buffer for each of its protocols. Their default sizes follow from its
constants (`src/include/device.h`, `src/init.cc`; `NCCL_BUFFSIZE` of its documentation):

* LL: 8 lines x 512 threads x 8 steps x 16 bytes = 512 KiB
* LL128: 120 words x 640 threads x 8 steps x 8 bytes = 4.69 MiB
* Simple: 4 MiB

A group with collectives has a ring and a tree: three neighbours that send to a rank, one in a group of two, where both
are the same rank. With 24 channels that is 694 MB for a group, where 688 MB are reported for four A100 with NVLink
(https://github.com/NVIDIA/nccl/issues/964). Messages between two ranks have channels of their own.

Left out: NVLink SHARP and symmetric memory, which take more, and settings that take less (`NCCL_MAX_NCHANNELS`,
`NCCL_BUFFSIZE`). A machine with `communicator_bytes` has that for each group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .machine import Machine

__all__ = ["GroupUse", "communicator_bytes"]

BUFFERS = (8 * 512 * 8 * 16) + (120 * 640 * 8 * 8) + (4 << 20)
"""Bytes of one connection of one channel."""
CHANNELS = 24
"""Channels of a group on devices with NVLink."""
PAIR_CHANNELS = 2
"""Channels between two ranks that send to each other. Assumed: NCCL takes more where links inside a host need it."""


@dataclass
class GroupUse:
    """The use of a process group.

    Attributes:
        ranks: of the group.
        collective: collectives run over it.
        peers: ranks that send to this one, or get something of it, by messages between two.
    """

    ranks: int
    collective: bool = False
    peers: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Bytes of the device."""
        neighbours = (2 if self.ranks == 2 else 3) if self.collective else 0
        return BUFFERS * (CHANNELS * neighbours + PAIR_CHANNELS * len(self.peers))


def communicator_bytes(groups: Iterable[GroupUse], machine: Machine) -> int:
    """Bytes of the device for the communicators of all groups; 0 where the device is a processor."""
    if machine.device != "cuda":
        return 0
    used = [group for group in groups if group.ranks > 1]
    given = machine.communicator_bytes
    return sum(group.nbytes for group in used) if given is None else given * len(used)
