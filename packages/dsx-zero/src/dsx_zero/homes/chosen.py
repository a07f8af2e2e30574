"""From the configuration's `offload_optimizer` and `offload_param` to a `Placement`."""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import ZeroConfigError
from .stored import TensorStore
from .tiers import DeviceTier, DiskTier, HostTier, Placement, Tier

__all__ = ["check_placement", "placement_of", "sub_group_size"]

_MOVING = 1 << 24
"""Elements of a sub-group where states come and go and the configuration does not say."""


class Section(Protocol):
    """What this file reads of `ZeroConfig`."""

    @property
    def stage(self) -> int: ...

    @property
    def sub_group_size(self) -> int: ...

    @property
    def model_fields_set(self) -> set[str]: ...

    @property
    def offload_param(self) -> Any: ...

    @property
    def offload_optimizer(self) -> Any: ...


def placement_of(settings: Section, store: TensorStore | None) -> Placement:
    """Where each class of state lives.

    Masters, optimizer states and (from stage 2 on) reduced gradients follow `offload_optimizer`; gradients are in host
    memory where the states are on disk, because they are written anew in each step. Shards of parameters follow
    `offload_param`.

    Raises:
        ZeroConfigError: the stage cannot have it, or state is to live on disk and there is no store.
    """
    states = _device(settings.offload_optimizer)
    parameters = _device(settings.offload_param)
    if states != "none" and settings.stage == 0:
        raise ZeroConfigError(
            "zero_optimization.offload_optimizer",
            f"got {states} at stage 0, where every rank steps everything; expected stage 1, 2 or 3",
        )
    if parameters != "none" and settings.stage < 3:
        raise ZeroConfigError(
            "zero_optimization.offload_param",
            f"got {parameters} at stage {settings.stage}, where parameters are whole on the device; expected stage 3",
        )
    if states == parameters == "none":
        return Placement()
    masters = _tier("offload_optimizer", settings.offload_optimizer, store)
    host = HostTier(pin=True if states == "none" else bool(settings.offload_optimizer.pin_memory))
    return Placement(
        parameters=_tier("offload_param", settings.offload_param, store),
        masters=masters,
        gradients=DeviceTier() if states == "none" else host,
        states=masters if states == "nvme" else None,
    )


def _device(section: Any) -> str:
    return "none" if section is None else section.device


def _tier(key: str, section: Any, store: TensorStore | None) -> Tier:
    device = _device(section)
    if device == "none":
        return DeviceTier()
    if device == "cpu":
        return HostTier(pin=bool(section.pin_memory))
    if store is None:
        raise ZeroConfigError(
            f"zero_optimization.{key}.device",
            "got nvme, but there is no store on disk; give dsx_zero.shard(store=dsx_nvme.TensorStore(folder)), with a"
            " folder for each rank (the package dsx-nvme)",
        )
    return DiskTier(store)


def check_placement(placement: Placement, stage: int) -> None:
    """Refuse what a stage cannot have.

    Raises:
        ZeroConfigError: says what, and from which stage on it can be.
    """
    if stage == 0 and not placement.on_device:
        raise ZeroConfigError(
            "placement", f"got {placement} at stage 0; expected stage 1, 2 or 3, or all of it on the device"
        )
    if stage < 3 and not isinstance(placement.parameters, DeviceTier):
        raise ZeroConfigError(
            "placement",
            f"got parameters on {placement.parameters.name} at stage {stage}, where they are whole; expected stage 3",
        )


def sub_group_size(settings: Section, *, moves: bool) -> int | None:
    """Elements of a sub-group of the step: what the configuration says, else as much as should move at once; None:
    no limit.
    """
    if "sub_group_size" in settings.model_fields_set:
        return settings.sub_group_size
    return _MOVING if moves else None
