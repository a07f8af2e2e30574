"""On which side of the link between device and host offloaded values are cast: the seconds of both sides.

With the optimizer on the host, gradients of 16 bits become 32 for the step, and masters of 32 bits become parameters of
16. A cast on the host sends the narrow dtype over the link and costs host memory; a cast on the device sends the wide
one. Per element, in bytes of the link, of the host's memory and of the device's memory (n: narrow, w: wide):

    gradient, cast on the host       n      arrives n, is read n, is written w, is read w by the step
      by a kernel that takes n       n      arrives n, is read n by the step
    gradient, cast on the device     w      arrives w, is read w by the step; device: n + w
    parameter, cast on the host      n      is read w, is written n, leaves n
    parameter, cast on the device    w      leaves w; device: w + n

The seconds are those of link and memories one after the other: what a cast costs where nothing hides it. Rates are the
machine's, as in `cost`.

Left out: when copies and casts run (`cost`), and the arithmetic of a cast, which is hidden behind its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dsx_zero.optimizer import ZeroOptimizer
from dsx_zero.step.inner import takes_narrow

from .ledger import DEVICE
from .machine import Machine

__all__ = ["Crossing", "crossings", "sides"]

GRADIENTS, PARAMETERS = "gradients", "parameters"


@dataclass(frozen=True)
class Crossing:
    """Bytes that one rank sends over the link in a step, with another dtype at its other end.

    Attributes:
        what: "gradients" or "parameters".
        elements: how many.
        narrow, wide: bytes of an element at the ends.
        taken: the optimizer's kernel reads the narrow dtype itself.
    """

    what: str
    elements: int
    narrow: int
    wide: int
    taken: bool = False


def crossings(optimizer: ZeroOptimizer, resident: Mapping[str, Mapping[str, int]]) -> list[Crossing]:
    """The crossings of a step of this optimizer between a device and its host, with casts.

    Args:
        resident: the bytes of its state by class and tier when gradients are there (`state_bytes_by_tier`).
    """
    found, total, wide = dict[tuple[str, int, int], int](), 0, 0
    for unit in optimizer.runtime.trainable_units():
        for group in unit.trainable:
            master = group.own_master
            if master is None or master.tier == DEVICE:
                continue
            total, wide = total + master.numel, max(wide, master.dtype.itemsize)
            key = (PARAMETERS, group.key.dtype.itemsize, master.dtype.itemsize)
            found[key] = found.get(key, 0) + master.numel
    away = sum(nbytes for tier, nbytes in resident.get("grads", {}).items() if tier != DEVICE)
    if total:
        found[GRADIENTS, round(away / total), wide] = total
    taken = takes_narrow(optimizer.inner)
    return [
        Crossing(what, elements, narrow, wide, taken=taken and what == GRADIENTS)
        for (what, narrow, wide), elements in found.items()
        if 0 < narrow < wide
    ]


def sides(found: Iterable[Crossing], machine: Machine, ranks_per_host: int) -> dict[str, dict[str, float]]:
    """Seconds of a step for the casts of each class of values: {"gradients": {"host": ..., "device": ...}, ...}; none
    on a machine whose device is the host.
    """
    if not machine.streams:
        return {}
    link, host = machine.host_link_bandwidth, machine.host_bandwidth / ranks_per_host
    device = machine.memory_bandwidth * machine.constants.memory
    seconds: dict[str, dict[str, float]] = {}
    for one in found:
        n, w = one.narrow, one.wide
        if one.what == PARAMETERS:
            here, there = w + 2 * n, w
        else:
            here, there = 2 * n if one.taken else 2 * (n + w), 2 * w
        of = seconds.setdefault(one.what, {"host": 0.0, "device": 0.0})
        of["host"] += one.elements * (n / link + here / host)
        of["device"] += one.elements * (w / link + there / host + (n + w) / device)
    return seconds
