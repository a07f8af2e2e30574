"""Tiers make homes; a `Placement` says, as data that is chosen once, which tier each class of state has.

To add a tier of your own, write a class with `name` and `home` and give it in a `Placement`. Nothing else is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from .blocks import HostBlocks
from .freed_memory import keep_heap_small
from .home import DeviceHome, Home, HostHome
from .stored import StoredHome, TensorStore

__all__ = ["DeviceTier", "DiskTier", "HostRoom", "HostTier", "MakesMemory", "Placement", "Tier", "UnitPlacement"]


class MakesMemory(Protocol):
    """Makes flat buffers on a device (`dsx_zero.params.memory.Memory`)."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...


class Tier(Protocol):
    """Makes the homes of one class of state."""

    @property
    def name(self) -> str:
        """The name of the tier in `state_bytes` and in the printed placement."""
        ...

    def home(self, name: str, numel: int, dtype: torch.dtype, device: torch.device, memory: MakesMemory) -> Home:
        """A new home for `numel` elements with arbitrary values. Every rank makes the same homes in the same order.

        Args:
            name: the name of the state, unique on this rank.
            device: the device that computes with the parameters.
            memory: allocates buffers on that device; may be collective.
        """
        ...


@dataclass(frozen=True)
class DeviceTier:
    """The device that computes with the parameters."""

    name: str = "device"

    def home(self, name: str, numel: int, dtype: torch.dtype, device: torch.device, memory: MakesMemory) -> Home:
        """See `Tier.home`."""
        return DeviceHome(memory.empty(numel, dtype, device))


@dataclass(frozen=True)
class HostTier:
    """Host memory; `pin`: page-locked where the device is a CUDA device."""

    pin: bool = True
    name: str = "host"

    def home(self, name: str, numel: int, dtype: torch.dtype, device: torch.device, memory: MakesMemory) -> Home:
        """See `Tier.home`."""
        if device.type != "cpu":  # there the model's activations share the heap: their pages were cleared in each step
            keep_heap_small()
        return HostHome(numel, dtype, device, pin=self.pin)


class HostRoom:
    """The number of elements that may stay in host memory although their tier is the disk (`max_in_cpu`)."""

    def __init__(self, elements: int) -> None:
        self.left = elements

    def take(self, numel: int) -> bool:
        """Reserve room for `numel` elements. Returns False, and reserves nothing, if there is too little."""
        if numel > self.left:
            return False
        self.left -= numel
        return True


@dataclass(frozen=True)
class DiskTier:
    """A store on disk.

    Attributes:
        store: the store. Units whose state is on disk are stepped during backward only if it is an `OneCallerAtATime`,
            the same one in all tiers of a `Placement`.
        piece: the most elements of one tensor in the store.
        host: homes that fit into this room stay in host memory; None: all homes are on disk.
        ahead: elements that may be read ahead of their use.
        ahead_count: homes that may be read ahead of their use.
        pin: host memory is page-locked if the device is a CUDA device.
        blocks: host memory for what is on its way to and from the disk.
    """

    store: TensorStore
    piece: int = 1 << 24
    name: str = "disk"
    host: HostRoom | None = field(default=None, compare=False)
    ahead: int = field(default=500_000_000, compare=False)
    ahead_count: int = field(default=5, compare=False)
    pin: bool = field(default=False, compare=False)
    blocks: HostBlocks = field(default_factory=HostBlocks, compare=False, repr=False)

    def home(self, name: str, numel: int, dtype: torch.dtype, device: torch.device, memory: MakesMemory) -> Home:
        """See `Tier.home`."""
        keep_heap_small()
        if self.host is not None and self.host.take(numel):
            return HostHome(numel, dtype, device, pin=self.pin)
        pin = self.pin and device.type == "cuda"
        return StoredHome(self.store, name, numel, dtype, piece=self.piece, pin=pin, blocks=self.blocks)


@dataclass(frozen=True)
class Placement:
    """The tiers in which each class of state lives between its uses.

    Attributes:
        parameters: shards of partitioned parameters (stage 3). At stages 0-2 the device holds complete parameters.
        masters: the tensors that the optimizer updates, unless they are the parameters' own memory.
        gradients: reduced gradients from stage 2 on, until the step.
        states: the optimizer's states per element; None: the optimizer makes them, where its masters are.
    """

    parameters: Tier = field(default_factory=DeviceTier)
    masters: Tier = field(default_factory=DeviceTier)
    gradients: Tier = field(default_factory=DeviceTier)
    states: Tier | None = None

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers of all classes of state."""
        tiers = (self.parameters, self.masters, self.gradients, self.states)
        return tuple(tier for tier in tiers if tier is not None)

    @property
    def blocks(self) -> HostBlocks:
        """Memory for what is on its way to and from disks; that of the first one, if there are several."""
        return next((tier.blocks for tier in self.tiers if isinstance(tier, DiskTier)), None) or HostBlocks()

    @property
    def on_device(self) -> bool:
        """Is everything on the device, as without offload?"""
        return all(isinstance(tier, DeviceTier) for tier in self.tiers)

    @property
    def state_tier(self) -> str:
        """The name of the tier of optimizer states."""
        return (self.masters if self.states is None else self.states).name

    def __str__(self) -> str:
        return (
            f"parameters: {self.parameters.name}, masters: {self.masters.name}, gradients: {self.gradients.name},"
            f" optimizer states: {self.state_tier}"
        )


@dataclass(frozen=True)
class UnitPlacement:
    """The tiers in which the state of one unit lives.

    Attributes:
        unit: the number of the unit.
        name: its name.
        elements: the elements of this rank's shards of it.
        placement: the tier of each class of its state.
    """

    unit: int
    name: str
    elements: int
    placement: Placement

    def __str__(self) -> str:
        return f"{self.name}, {self.elements:,} elements: {self.placement}"
