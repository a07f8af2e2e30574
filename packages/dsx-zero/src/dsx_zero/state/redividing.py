"""Moves masters and optimizer states from one layout of a model to another, by name, one parameter at a time: every
rank gets the whole parameter and keeps what it owns now. Nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dsx_comm
import torch
from dsx_comm import RankSet

from ..homes.home import read
from ..params.flat import FlatGroup
from ..params.whole import join_ranges, join_whole, read_whole
from ..plan.layout import LocalSlice
from ..plan.units import ParameterInfo
from ..runtime import Runtime
from ..step.inner import StepGroups
from ..step.masters import Master
from ..step.states import OptimizerStates
from .layout import ModelLayout
from .loading import SliceLoad, read_master
from .shapes import ShapedState
from .slices import State, own_states
from .templates import StateTemplates

__all__ = ["Moves"]


@dataclass(frozen=True)
class _Move:
    """A parameter whose masters get another place."""

    name: str
    group: FlatGroup
    masters: tuple[Master, ...]
    part: LocalSlice | None

    @property
    def dtype(self) -> torch.dtype:
        return self.group.master_dtype


class _Whole:
    """The `Reader` of one parameter whose values are whole in memory."""

    def __init__(self, master: torch.Tensor | None, states: Mapping[str, Any]) -> None:
        self._master, self._states = master, states

    def param(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        return None  # the parameters have moved already

    def master(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        return None if self._master is None else self._master.reshape(-1)[start:stop]

    def state_keys(self, name: str) -> tuple[str, ...]:
        return tuple(self._states)

    def state(self, key: str, name: str, start: int, stop: int) -> State | None:
        value = self._states[key]
        return value.reshape(-1)[start:stop] if isinstance(value, torch.Tensor) and value.dim() else value

    def shaped_state(self, key: str, name: str, start: int, stop: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        value = self._states[key]
        if isinstance(value, ShapedState):
            return value.values[start - value.start : stop - value.start]
        return value.reshape(-1)[start:stop] if isinstance(value, torch.Tensor) else None


_Described = dict[str, tuple[str | None, Any]]
"""States of one parameter by key: the dtype of one with a value per element, with its shape if that is its own; or the
single value.
"""


@dataclass(frozen=True)
class Moves:
    """The parameters whose states move from one layout to the other, in definition order."""

    moves: tuple[_Move, ...]
    states: OptimizerStates
    whole: bool

    @classmethod
    def of(
        cls,
        layout: ModelLayout,
        states: OptimizerStates,
        groups: StepGroups,
        infos: Sequence[ParameterInfo],
        moving: Collection[FlatGroup],
        *,
        whole: bool,
    ) -> Moves:
        """The moves of the parameters in these flat groups. Raises ZeroStateError for states that cannot be divided
        again.

        Args:
            layout, states, groups: those that are left.
            whole: whether each rank has whole masters and states.
        """
        moves, places = [], {name: group for group in moving for name in group.layout.names}
        for info in infos:
            group = places.get(info.name)
            if group is not None:
                index = group.layout.index(info.name)
                part = group.whole_slice(index) if whole else group.layout.local_slice(info.name, group.rank)
                moves.append(_Move(info.name, group, layout.masters_of(info.name), part))
        found = cls(tuple(moves), states, whole)
        with groups.masters():
            templates = StateTemplates(states.inner)
            for move in found.moves:
                found._states_of(move, templates, lazily=True)
        return found

    def carry_out(
        self, runtime: Runtime, masters: Sequence[Master], states: OptimizerStates, groups: StepGroups
    ) -> None:
        """Bring masters and states to their places in the new layout (collective)."""
        by_name: dict[str, list[Master]] = {}
        for master in masters:
            by_name.setdefault(master.name, []).append(master)
        with groups.masters():
            templates = StateTemplates(states.inner)
            described = self._describe(templates)
            for move in self.moves:
                values = self._gather(move, described[move.name], templates)
                load = SliceLoad(runtime, states.inner)
                for master in by_name.get(move.name, ()):
                    read_master(load, states, values, master, templates)
                load.write()
                for master in move.masters:
                    self.states.forget(master)

    def _states_of(self, move: _Move, templates: StateTemplates, *, lazily: bool) -> dict[str, Any]:
        if move.part is None or not move.part.numel:
            return {}
        return own_states(self.states, move.masters, move.part, templates, lazily, lambda tensor: tensor)

    def _describe(self, templates: StateTemplates) -> dict[str, _Described]:
        """The states that each parameter has, on all ranks alike: some may own nothing of it."""
        mine: dict[Any, dict[str, _Described]] = {}
        for move in self.moves:
            found: _Described = {}
            for key, value in self._states_of(move, templates, lazily=True).items():
                if isinstance(value, ShapedState):
                    found[key] = (str(value.values.dtype).removeprefix("torch."), value.shape)
                elif isinstance(value, (int, float)) or not value.dim():
                    found[key] = (None, value.item() if isinstance(value, torch.Tensor) else value)
                else:
                    found[key] = (str(value.dtype).removeprefix("torch."), None)
            mine.setdefault(move.group.ranks, {})[move.name] = found
        described: dict[str, _Described] = {}
        for ranks, names in mine.items():
            if ranks.size > 1 and not self.whole:
                names = dsx_comm.merge_objects(names, _first_known, ranks.group)
            described |= names
        return described

    def _gather(self, move: _Move, described: _Described, templates: StateTemplates) -> _Whole:
        group, device = move.group, move.group.key.device
        master = None
        if group.own_master is not None:
            if self.whole and move.part is not None:
                part = move.part
                master = read(group.own_master, part.offset, part.offset + part.numel)
            elif not self.whole:
                master = read_whole(group.layout, move.name, group.own_master, group.ranks, device=device)
        mine, states = self._states_of(move, templates, lazily=False), {}
        for key, (dtype, value) in described.items():
            held = mine.get(key)
            if dtype is None or self.whole:
                states[key] = value if dtype is None else held
                continue
            kind = getattr(torch, dtype)
            if value is not None:
                states[key] = _join_shaped(held, value, group.ranks, torch.empty(0, dtype=kind, device=device))
                continue
            states[key] = join_whole(
                group.layout, move.name, mine.get(key), group.ranks, dtype=kind, device=device
            ).reshape(-1)
        return _Whole(master, states)


def _join_shaped(held: ShapedState | None, shape: tuple[int, ...], ranks: RankSet, like: torch.Tensor) -> torch.Tensor:
    """All that the ranks have of a state with a shape of its own, 1-D (collective)."""
    start, values = (0, like) if held is None else (held.start, held.values)
    groups = (ranks.group,) if ranks.size > 1 else ()
    return join_ranges(shape, start, values, groups=groups, device=like.device).view(-1)


def _first_known(one: dict[str, _Described], other: dict[str, _Described]) -> dict[str, _Described]:
    # Key by key: of a small state of its own shape, a rank with elements of the parameter may have nothing.
    return {name: {**other[name], **found} for name, found in one.items()}
