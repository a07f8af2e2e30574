"""`ModelLayout`: where this rank keeps each parameter of a model, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..homes.home import Home
from ..params.flat import FlatGroup
from ..plan.layout import LocalSlice
from ..step.masters import Master

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["ModelLayout"]


class ModelLayout:
    """The flat group of each parameter and this rank's masters of it, by the parameter's first name.

    Args:
        faces: what the model holds between uses, for the `id` of each plain parameter that takes its place meanwhile.

    Attributes:
        masters: this rank's masters by the name of their parameter; none where this rank owns nothing of it.
        parameters: all plain parameters with their names, and after them their faces.
        names: the names of all of these by `id`. The model keeps them, so that no other tensor gets their identity.
    """

    def __init__(self, runtime: Runtime, masters: Sequence[Master], faces: Mapping[int, torch.Tensor]) -> None:
        self._stage = runtime.stage
        self._groups = {name: group for unit in runtime.units for group in unit.groups for name in group.layout.names}
        self.masters: dict[str, tuple[Master, ...]] = {}
        for master in masters:
            self.masters[master.name] = (*self.masters.get(master.name, ()), master)
        flat = [group for unit in runtime.units for group in unit.groups]
        plain: list[tuple[torch.Tensor, str]] = [(p, n) for g in flat for p, n in zip(g.parameters, g.layout.names)]
        self.parameters = (*plain, *((faces[id(p)], name) for p, name in plain if id(p) in faces))
        self.names = {id(parameter): name for parameter, name in self.parameters}

    def group_of(self, name: str) -> FlatGroup:
        """The flat group of a parameter."""
        return self._groups[name]

    def masters_of(self, name: str) -> tuple[Master, ...]:
        """The masters of a parameter; none where this rank owns nothing of it."""
        return self.masters.get(name, ())

    def master_of(self, parameter: torch.Tensor) -> tuple[torch.Tensor | None, str] | None:
        """This rank's master of a parameter of the model, and the parameter's name; None for other tensors."""
        name = self.names.get(id(parameter))
        if name is None:
            return None
        masters = self.masters_of(name)
        return masters[0].tensor if masters else None, name

    def part_of(self, name: str, *, whole: bool) -> tuple[LocalSlice, Home]:
        """The elements of a parameter that this rank owns, or all of one that every rank keeps (`whole`), and where the
        parameter itself has them.
        """
        group = self._groups[name]
        if whole:
            return group.whole_slice(group.layout.index(name)), group.all_visible()
        return group.layout.local_slice(name, group.rank) or LocalSlice(0, 0, 0), group.shard

    def homes_of(self, name: str) -> Iterator[tuple[Home, LocalSlice]]:
        """The home of the values of a parameter that all others follow: its master, or a frozen parameter
        itself; and which elements lie there. After writing: `HeldState.note_loaded`.
        """
        group = self._groups[name]
        whole = self._stage == 0 or (self._stage < 3 and not group.trainable)
        index = group.layout.index(name)
        part = group.whole_slice(index) if whole else group.layout.local_slice(name, group.rank)
        home = group.master if group.trainable else None
        if home is None:
            home = group.all_visible() if whole else group.shard
        if part is not None:
            yield home, part
