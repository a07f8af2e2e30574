"""From the configuration's `offload_optimizer` and `offload_param` to a `Placement`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from dsx_core.host_memory import free_host_memory

from ..errors import ZeroConfigError
from .blocks import HostBlocks
from .stored import OneCallerAtATime, TensorStore
from .tiers import DeviceTier, DiskTier, HostRoom, HostTier, Placement, Tier, UnitPlacement

__all__ = [
    "check_placement",
    "check_room",
    "late_update_after",
    "makes_states_at_once",
    "may_step_during_backward",
    "offload_ratio",
    "place_units",
    "placement_of",
    "room_for_copies",
    "room_for_new_values",
    "speculates",
    "states_at_once",
    "steps_during_backward",
    "sub_group_size",
    "transfers_beside_step",
]

_MOVING = 1 << 22
"""Elements of a sub-group where states are fetched and stored and the configuration sets no size. Transfers of 16 MiB
are as fast as larger ones, and the memory of a few sub-groups stays from step to step."""

_LEAST_MOVING = 1 << 20
"""Least elements of a sub-group, however little room there is in host memory: smaller transfers are slow."""

_ALIGNMENT = 256
"""Elements: where the plan of the step cuts parameters (`step.plan.ALIGNMENT`); pieces on disk are cut there too."""


class Section(Protocol):
    """The part of `ZeroConfig` that this file reads."""

    @property
    def stage(self) -> int: ...

    @property
    def sub_group_size(self) -> int: ...

    @property
    def model_fields_set(self) -> set[str]: ...

    @property
    def save_muon_momentum_buffer_in_memory(self) -> bool: ...

    @property
    def offload_param(self) -> Any: ...

    @property
    def offload_optimizer(self) -> Any: ...


def placement_of(settings: Section, store: TensorStore | None) -> Placement:
    """Choose where each class of state lives.

    * Shards of parameters follow `offload_param`.
    * Masters and optimizer states follow `offload_optimizer`. With `save_muon_momentum_buffer_in_memory`, the states of
      masters on disk stay in host memory.
    * Reduced gradients (from stage 2 on) follow `offload_optimizer` too. Where it says disk, they are in host memory,
      because each step writes them again; they are on disk only if the parameters are there as well.

    Raises:
        ZeroConfigError: the stage does not allow it, or state is to live on disk and there is no store.
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
    if store is not None:
        store = OneCallerAtATime(store)
    size = sub_group_size(settings, moves=True) or _MOVING
    piece = min(_MOVING, max(_ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT))
    blocks = HostBlocks()
    masters = _tier("offload_optimizer", settings.offload_optimizer, store, piece, blocks)
    host = HostTier(pin=True if states == "none" else bool(settings.offload_optimizer.pin_memory))
    gradients: Tier = DeviceTier() if states == "none" else host
    return Placement(
        parameters=_tier("offload_param", settings.offload_param, store, piece, blocks),
        masters=masters,
        gradients=masters if states == parameters == "nvme" else gradients,
        states=(host if settings.save_muon_momentum_buffer_in_memory else masters) if states == "nvme" else None,
    )


def place_units(
    units: Sequence[tuple[int, str, int]], placement: Placement, *, ratio: float
) -> tuple[UnitPlacement, ...]:
    """Choose where the state of each unit lives.

    Args:
        units: number, name and elements of this rank's shards, in order.
        ratio: fraction of the elements whose masters, gradients and states are offloaded (Twin-Flow, `ratio` of
            `offload_optimizer`), in whole units. The last units are offloaded; the device steps the first ones, at the
            same time as the host steps the last ones.
    """
    on_device = Placement(parameters=placement.parameters)
    left = sum(elements for _, _, elements in units) * (1.0 - ratio)
    records = []
    for number, name, elements in units:
        stays = ratio < 1.0 and elements / 2 < left
        left -= elements
        records.append(UnitPlacement(number, name, elements, on_device if stays else placement))
    return tuple(records)


def offload_ratio(settings: Section) -> float:
    """`offload_optimizer.ratio`."""
    section = settings.offload_optimizer
    return 1.0 if _device(section) == "none" else float(section.ratio)


def _device(section: Any) -> str:
    return "none" if section is None else section.device


def _tier(key: str, section: Any, store: TensorStore | None, piece: int, blocks: HostBlocks) -> Tier:
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
    if key == "offload_optimizer":
        return DiskTier(store, piece=piece, blocks=blocks)
    return DiskTier(
        store,
        piece=piece,
        host=HostRoom(section.max_in_cpu),
        ahead=section.buffer_count * section.buffer_size,
        ahead_count=section.buffer_count,
        pin=bool(section.pin_memory),
        blocks=blocks,
    )


def check_room(placement: Placement, shards: Mapping[str, int]) -> None:
    """Refuse a disk whose host buffers are too small for the largest unit.

    Args:
        shards: elements of this rank's shard of each unit on that disk, by the unit's name.

    Raises:
        ZeroConfigError: names the unit and the sizes.
    """
    tier = placement.parameters
    if not isinstance(tier, DiskTier) or not shards:
        return
    name, largest = max(shards.items(), key=lambda item: item[1])
    if 0 < tier.ahead < largest:  # 0: nothing is read ahead
        raise ZeroConfigError(
            "zero_optimization.offload_param.buffer_size",
            f"got buffer_count x buffer_size = {tier.ahead:,} elements of host memory, expected at least the"
            f" {largest:,} of this rank's part of unit {name}; raise one of them",
        )


def check_placement(placement: Placement, stage: int) -> None:
    """Refuse a placement that the stage does not allow.

    Raises:
        ZeroConfigError: names the placement, and the stages that allow it.
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
    """Elements of a sub-group of the step: what the configuration sets, else a default where state is moved; None: no
    limit. Sub-groups of states on disk that are in host memory together have no more elements than
    `offload_optimizer.max_in_cpu`, if it is set.
    """
    given = settings.sub_group_size if "sub_group_size" in settings.model_fields_set else None
    if not moves:
        return given
    size = _MOVING if given is None else given
    if not _has_budget(settings.offload_optimizer):
        return size
    each = settings.offload_optimizer.max_in_cpu // _sub_groups_at_once(settings)
    return min(size, max(_LEAST_MOVING, each // _ALIGNMENT * _ALIGNMENT))


def _has_budget(section: Any) -> bool:
    return _device(section) == "nvme" and "max_in_cpu" in section.model_fields_set


def _sub_groups_at_once(settings: Section) -> int:
    """Sub-groups in host memory: one is stepped while others are read and written."""
    return 1 + sum(transfers_beside_step(settings))


def states_at_once(settings: Section, elements: int) -> str | None:
    """A warning where the configuration makes a step load all states of a rank that are on disk at once; else None.

    Args:
        elements: how many of this rank's masters are on disk.
    """
    size = sub_group_size(settings, moves=True)
    if size is None or _has_budget(settings.offload_optimizer) or min(size, elements) <= _MOVING:
        return None
    if size * _sub_groups_at_once(settings) < elements:
        return None
    return (
        f"zero_optimization.sub_group_size: got {size:,}, so that a step has the masters, gradients and optimizer"
        f" states of all {elements:,} elements of this rank in host memory at once, although they are on disk."
        f" Remove it ({_MOVING:,} is used then), or set offload_optimizer.max_in_cpu to the elements for which there"
        " is room in host memory"
    )


def may_step_during_backward(placement: Placement) -> bool:
    """Can a thread of the host step the masters while another one runs backward?

    It can if they are in host memory or on disk, and if both threads may use the tiers at the same time: memory, and
    one store that takes one caller at a time.
    """
    tiers = [placement.parameters, placement.masters, placement.gradients]
    tiers += [] if placement.states is None else [placement.states]
    stores = {id(tier.store) for tier in tiers if isinstance(tier, DiskTier)}
    shared = all(isinstance(tier.store, OneCallerAtATime) for tier in tiers if isinstance(tier, DiskTier))
    known = all(isinstance(tier, (DeviceTier, HostTier, DiskTier)) for tier in tiers)
    return known and shared and len(stores) <= 1 and isinstance(placement.masters, (HostTier, DiskTier))


def room_for_new_values(settings: Section, placement: Placement) -> int:
    """Elements of new values of parameters that may wait in host memory for the step, while units are stepped during
    backward: `offload_optimizer.max_in_cpu`. Where parameters are on disk, what `offload_param.max_in_cpu` leaves.
    """
    section, tier = settings.offload_optimizer, placement.parameters
    room = _ROOM if section is None else int(section.max_in_cpu)
    return min(room, tier.host.left) if isinstance(tier, DiskTier) and tier.host is not None else room


_ROOM = 1_000_000_000
"""The default of `offload_optimizer.max_in_cpu`, for a placement without that section."""


def speculates(settings: Section, devices: Collection[str]) -> bool:
    """Are units stepped during backward where that may have to be undone? On a CPU only if the configuration sets
    `step_during_backward`: its cores compute backward, so that nothing is hidden, and copies of old values cost time.
    """
    section = settings.offload_optimizer
    asked = section is not None and "step_during_backward" in section.model_fields_set
    return asked or "cpu" not in devices


def room_for_copies(settings: Section, elements: int) -> int:
    """Elements whose old values, masters and states, may be copied while units are stepped speculatively:
    `offload_optimizer.max_in_cpu` if it is set, and at most half of the memory that is left to this rank of the host
    when the states of all `elements` are there.
    """
    section = settings.offload_optimizer
    free = free_host_memory() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    room = max(0, (free - _STATE_BYTES * elements) // 2 // (_STATE_BYTES + 4))
    if section is None or "max_in_cpu" not in section.model_fields_set:
        return room
    return min(room, int(section.max_in_cpu))


_STATE_BYTES = 8
"""Of one element: Adam's two moments in fp32. The master has 4 more."""


def makes_states_at_once(settings: Section) -> bool:
    """`offload_optimizer.fast_init`, which concerns states on disk."""
    return _device(settings.offload_optimizer) == "nvme" and settings.offload_optimizer.fast_init


def late_update_after(settings: Section) -> int | None:
    """`offload_optimizer.late_update_after`."""
    section = settings.offload_optimizer
    return None if _device(section) == "none" else section.late_update_after


def steps_during_backward(settings: Section) -> bool:
    """`offload_optimizer.step_during_backward`; without that section `shard(placement=...)` decides."""
    section = settings.offload_optimizer
    return section is None or bool(section.step_during_backward)


_BUFFERS = 4
"""Host buffers for each sub-group that is read ahead: values, gradient and two moments."""


def transfers_beside_step(settings: Section) -> tuple[int, int]:
    """The number of sub-groups that are read ahead of the one that is stepped, and of those that may still be being
    stored (`offload_optimizer`'s `buffer_count`, `pipeline_read` and `pipeline_write`).

    Both are on unless the configuration sets them to false. `false` is also the documented default of these keys, but a
    configuration that does not set them gets true.
    """
    section = settings.offload_optimizer
    if _device(section) == "none":
        return 1, 1
    reads = section.pipeline_read or "pipeline_read" not in section.model_fields_set
    writes = section.pipeline_write or "pipeline_write" not in section.model_fields_set
    return section.buffer_count // _BUFFERS if reads else 0, 1 if writes else 0
