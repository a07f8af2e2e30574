"""Tests on all ranks, before a model is changed, whether page-locked host memory can be allocated.

Locking pages may fail: by a limit of the system, or because there is too little memory. After a model is divided
halfway, this cannot be undone. So the homes that will be page-locked are allocated once as a trial, and freed. That
costs the time of locking their pages once more.

Left out: the optimizer's own states, which it makes on its masters' device and does not lock, and buffers in host
memory for state on disk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .homes.home import HostHome
from .homes.tiers import DeviceTier, HostTier, Placement, Tier
from .plan.units import GroupKey
from .precision import Precision
from .recipe import Planned

__all__ = ["ask_for_locked_pages"]


def ask_for_locked_pages(planned: Planned, *, stage: int, precision: Precision) -> None:
    """Make and let go everything that is to be page-locked. Nothing where the model does not compute on a CUDA device.

    Raises:
        ZeroStateError: memory, or locking its pages, is refused; says how much, and how to go on without.
    """
    made: list[HostHome] = []
    for plan in planned.plans:
        placement = planned.placed(plan.index)
        for group in plan.groups:
            key, numel = group.key, group.layout.shard_numel
            if key.device.type != "cuda" or not numel:
                continue
            for tier, dtype in _states(key, placement, precision, stage=stage, resident=plan.resident or stage < 3):
                if isinstance(tier, HostTier) and tier.pin:
                    made.append(HostHome(numel, dtype, key.device, pin=True))


def _states(
    key: GroupKey, placement: Placement, precision: Precision, *, stage: int, resident: bool
) -> Iterator[tuple[Tier, torch.dtype]]:
    """The tiers in which the shard of a flat group, its gradients and its masters will live, with their dtypes."""
    parameters = DeviceTier() if resident else placement.parameters
    yield parameters, key.dtype
    if not key.trainable:
        return
    if stage >= 1:
        yield placement.gradients, precision.gradient_dtype(key.dtype)
    wide_enough = key.dtype.itemsize >= precision.master.itemsize
    if not (wide_enough and placement.masters == parameters):  # else the parameter is its own master
        yield placement.masters, key.dtype if wide_enough else precision.master
