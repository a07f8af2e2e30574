"""Which tier each class of state has, as data that is chosen once; a tier makes homes.

A tier of one's own is a class with `name` and `home`; it is given in a `Placement` and needs no other place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

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
        """What `state_bytes` and the printed placement call it."""
        ...

    def home(self, name: str, numel: int, dtype: torch.dtype, device: torch.device, memory: MakesMemory) -> Home:
        """A new home for `numel` elements of arbitrary values. Every rank makes the same homes in the same order.

        Args:
            name: which state it is, unique on this rank.
            device: where the parameters compute.
            memory: where buffers on that device come from; may be collective.
        """
        ...


@dataclass(frozen=True)
class DeviceTier:
    """The device that the parameters compute on."""

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
        return HostHome(numel, dtype, device, pin=self.pin)


class HostRoom:
    """How many elements may stay in host memory although their tier is the disk (`max_in_cpu`)."""

    def __init__(self, elements: int) -> None:
        self.left = elements

    def take(self, numel: int) -> bool:
        """Take room for so many, if there is."""
        if numel > self.left:
            return False
        self.left -= numel
        return True


@dataclass(frozen=True)
class DiskTier:
    """A store on disk.

    Attributes:
        store: where.
        piece: elements of one tensor in it.
        host: what fits stays in host memory; None: nothing does.
        ahead: elements that may be read ahead of their use.
        ahead_count: and how many homes.
        pin: host memory is page-locked, where the device is a CUDA device.
    """

    store: TensorStore
    piece: int = 1 << 24
    name: str = "disk"
    host: HostRoom | None = field(default=None, compare=False)
    ahead: int = field(default=500_000_000, compare=False)
    ahead_count: int = field(default=5, compare=False)
    pin: bool = field(default=False, compare=False)

    def home(self, name: str, numel: int, dtype: torch.dtype, device: torch.device, memory: MakesMemory) -> Home:
        """See `Tier.home`."""
        if self.host is not None and self.host.take(numel):
            return HostHome(numel, dtype, device, pin=self.pin)
        return StoredHome(self.store, name, numel, dtype, piece=self.piece, pin=self.pin and device.type == "cuda")


@dataclass(frozen=True)
class Placement:
    """Where each class of state lives between its uses.

    Attributes:
        parameters: shards of parameters that are partitioned (stage 3). At stages 0-2 parameters are whole on the
            device.
        masters: what the optimizer updates, where it is not the parameter's own memory.
        gradients: reduced gradients from stage 2 on, until the step.
        states: what the optimizer keeps per element; None: beside the masters, in tensors that the optimizer makes.
    """

    parameters: Tier = field(default_factory=DeviceTier)
    masters: Tier = field(default_factory=DeviceTier)
    gradients: Tier = field(default_factory=DeviceTier)
    states: Tier | None = None

    @property
    def on_device(self) -> bool:
        """Is all of it on the device, as without offload?"""
        tiers = (self.parameters, self.masters, self.gradients, self.states)
        return all(tier is None or isinstance(tier, DeviceTier) for tier in tiers)

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
    """Where the state of one unit lives.

    Attributes:
        unit: its number.
        name: what it is called.
        elements: of this rank's shards of it.
        placement: the tiers.
    """

    unit: int
    name: str
    elements: int
    placement: Placement

    def __str__(self) -> str:
        return f"{self.name}, {self.elements:,} elements: {self.placement}"
