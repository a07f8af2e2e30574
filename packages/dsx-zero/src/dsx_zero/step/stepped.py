"""The CPU optimizer step beside the device's work: the step that was announced, its flat groups with what shows later
writes, and the gradients of a late update.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dsx_comm.lanes import Ticket

from ..grads.local import NoReductions
from ..grads.reductions import Reductions
from ..homes.blocks import HostBlocks
from ..homes.home import DeviceHome, Home, HostHome, read, write
from ..homes.stored import StoredHome
from ..params.flat import FlatGroup, Part, cut_parts
from ..runtime import Runtime
from .edits import Edits
from .inner import InnerStep, ReadGradients, Settings, same_settings, takes_narrow

__all__ = [
    "AnnouncedStep", "KeptGradients", "SteppedGroup", "gradients_in", "note_stepped", "wait_for_gradients",
    "writes_since",
]  # fmt: skip


@dataclass
class AnnouncedStep:
    """The step that was announced.

    Attributes:
        factor: what its gradients are multiplied with.
        units: those that are stepped early.
        undoable: it can be undone, and is undone if the factor is another one.
        trial: nothing is stepped early in it.
    """

    grad_scale: float
    factor: float
    settings: Settings
    inner_step: InnerStep
    units: Collection[int]
    undoable: bool
    trial: bool

    def differences(self, grad_scale: float, max_norm: float | None, settings: Settings) -> Iterator[str]:
        """Descriptions of what the step says otherwise than the announcement."""
        if grad_scale != self.grad_scale:
            yield f"got grad_scale={grad_scale}, expected the announced {self.grad_scale}"
        if max_norm and not self.undoable:
            yield f"got max_norm={max_norm}, which needs the norm of the gradients before the first update"
        if not same_settings(self.settings, settings):
            yield "the settings of the parameter groups (lr, ...) were changed between backward and step"


@dataclass
class SteppedGroup:
    """A flat group whose masters were stepped, and numbers that show later writes to it: each write makes one of them
    grow.
    """

    group: FlatGroup
    gradients: Home
    arriving: Ticket | None
    before: list[int] = field(default_factory=list)
    """Of gradients and partitioned parameters, from before the thread has begun."""
    stepped: int = 0
    """Of the masters, which the thread writes itself."""

    def __post_init__(self) -> None:
        self.before = self._sources()

    def _sources(self) -> list[int]:
        return [_version(self.gradients), self.group.replaced]

    def note_stepped(self) -> None:
        """The masters have the values that they keep until the step."""
        self.stepped = _version(self.group.master)

    def was_written(self) -> bool:
        """Was anything written since?"""
        return self._sources() != self.before or _version(self.group.master) != self.stepped


def _version(home: Home | None) -> int:
    """Grows with each write. A view would make the host wait for values that are under way, in the middle of backward;
    a store of them was counted when it was launched.
    """
    if isinstance(home, (DeviceHome, HostHome)):
        return home.memory._version
    return home.writes if isinstance(home, StoredHome) else 0  # units with other tiers are not stepped early


def wait_for_gradients(groups: Sequence[SteppedGroup]) -> None:
    """Wait until the reduced gradients are in their homes."""
    for entry in groups:
        if entry.arriving is not None:
            entry.arriving.synchronize()


def note_stepped(groups: Sequence[SteppedGroup]) -> None:
    """The masters have the values that they keep until the step: remember their versions."""
    for entry in groups:
        entry.note_stepped()


def writes_since(
    stepped: Mapping[int, Sequence[SteppedGroup]],
    reductions: Reductions | NoReductions,
    edits: Edits,
    names: Mapping[int, str],
) -> Iterator[str]:
    """Descriptions of what was written since units were stepped and would give other values."""
    for unit, groups in stepped.items():
        now = reductions.reduced(unit)
        dropped = any(home is not entry.gradients for entry, (_, home, _) in zip(groups, now, strict=True))
        if dropped or any(entry.was_written() for entry in groups):
            yield f"gradients or masters of unit {names[unit]} were written between backward and step"
        if edits.were_written([entry.group for entry in groups]):
            yield f"parameters of unit {names[unit]} were written between backward and step"


def gradients_in(
    homes: Mapping[FlatGroup, Home], blocks: HostBlocks | None, inner: Any, *, copied: bool = False
) -> ReadGradients:
    """Reads reduced gradients from homes, as `Reductions.parts` does, for the optimizer `inner`.

    Args:
        copied: give copies, to an optimizer that may change them.
    """
    as_kept = takes_narrow(inner)

    def gradients(group: FlatGroup, parts: Sequence[Part]) -> tuple[torch.Tensor, ...]:
        found = cut_parts(homes[group], group, parts, blocks, as_kept=as_kept)
        return tuple(grad.clone() for grad in found) if copied else found

    return gradients


class KeptGradients:
    """Copies of reduced gradients in host memory, for an update during which backward writes new ones."""

    def __init__(self) -> None:
        self.homes: dict[FlatGroup, HostHome] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(home.nbytes for home in self.homes.values())

    def take(self, runtime: Runtime) -> None:
        """Copy the gradients of all units, in the dtype in which they are kept."""
        for unit in runtime.trainable_units():
            for group, home, arriving in runtime.gradients.reductions.reduced(unit.index):
                if arriving is not None:
                    arriving.synchronize()
                if group not in self.homes:
                    self.homes[group] = HostHome(home.numel, home.dtype, torch.device("cpu"), pin=False)
                write(self.homes[group], read(home))
