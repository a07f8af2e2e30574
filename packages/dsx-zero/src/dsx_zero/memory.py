"""Where flat buffers lie that take part in collectives: in ordinary memory, or in memory that the ranks of the host share.

In shared memory an all-gather reads the peers' shards straight into its destination, and reductions read the peers' gradients where they
lie: nothing is staged. `dsx_comm.empty` has such memory for host tensors on groups of the "dsx" backend; everywhere else this is
`torch.empty`. One allocation per flat buffer, released with the last tensor over it; it has no name in the file system that a killed
process could leave behind. Allocating is collective, so buffers that come and go (the whole gradients of stages 2 and 3) stay ordinary.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import dsx_comm
import torch

__all__ = ["Memory", "OrdinaryMemory", "SharedMemory", "memory_of"]

_log = logging.getLogger(__name__)


class Memory(Protocol):
    """Makes flat buffers."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor with arbitrary contents. Collective."""
        ...

    def ahead(self, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The buffer for a later use, where it must be made now, by all ranks together. Collective."""
        ...


class OrdinaryMemory:
    """This process' own."""

    def ahead(self, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        """None: it can be made when it is needed."""
        return ()

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Memory.empty`."""
        return torch.empty(numel, dtype=dtype, device=device)


class SharedMemory:
    """Shared by the ranks of `group` where they can, ordinary where they cannot (on all ranks alike)."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def ahead(self, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        """See `Memory.ahead`."""
        return (self.empty(numel, dtype, device),)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Memory.empty`."""
        if device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=dtype, device=device)
        try:
            return dsx_comm.empty(numel, dtype=dtype, group=self._group)
        except dsx_comm.SymmetricMemoryError as error:
            _log.warning("%s; this buffer lies in ordinary memory", error)
            return torch.empty(numel, dtype=dtype)


def memory_of(group: Any) -> Memory:
    """The memory for buffers that `group` communicates."""
    return SharedMemory(group) if dsx_comm.get_backend(group) == "dsx" else OrdinaryMemory()
