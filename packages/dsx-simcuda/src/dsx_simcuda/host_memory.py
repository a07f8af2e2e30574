"""Accesses of native code to pinned memory, which neither a fault nor an operator of torch shows.

PyTorch's operators on pinned memory are watched by themselves. Code of one's own that gets an address (a writer of
files, a kernel for the CPU) says what it is going to touch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import native

if TYPE_CHECKING:
    import torch


def host_reads(memory: torch.Tensor, by: str = "native code") -> None:
    """Says that the host is about to read `memory`, a CPU tensor, past PyTorch.

    A report comes if a copy from a device writes some of it, and the host has not waited for that copy. `by` names the
    reader in it. Does nothing where no device is installed, and for memory that is not pinned. Raises `ValueError` for
    memory of a device, which the host cannot touch.
    """
    _touch(memory, False, by)


def host_writes(memory: torch.Tensor, by: str = "native code") -> None:
    """Says that the host is about to write `memory`, as `host_reads`: copies to a device that read it count as well."""
    _touch(memory, True, by)


def _touch(memory: torch.Tensor, write: bool, by: str) -> None:
    if memory.device.type != "cpu":
        raise ValueError(f"memory: got a tensor on {memory.device}, expected one in host memory")
    if native.lib is None or not memory.numel():
        return
    # From the first element to the last: what lies between the elements of a tensor with gaps counts, too.
    last = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride()))
    nbytes = (last + 1) * memory.element_size()
    native.lib.sim_host_access(memory.data_ptr(), nbytes, int(write), by.encode())
