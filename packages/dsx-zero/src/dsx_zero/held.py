"""`HeldState`: the values of a sharded model that this rank holds, to be read and written from outside a step.

They are read by name and range (`slices`), by a reader of such ranges (`read`), as this rank's own dictionary
(`local_state`), and counted. Values that `offload_states` has moved are read where they lie, in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .assembling import StepParts
from .errors import ZeroStateError
from .plan.layout import LocalSlice
from .state.layout import ModelLayout
from .state.loading import SliceLoad, publish_masters, read_slices
from .state.local import count_bytes, load_local, save_local
from .state.slices import ParamSlice, Reader, iter_slices, read_elements
from .update import Update

__all__ = ["HeldState"]


class HeldState:
    """The values that this rank holds of one model, in whatever layout it has now.

    Attributes:
        parts, layout, update: those of this layout.
    """

    parts: StepParts
    layout: ModelLayout
    update: Update

    def take(self, parts: StepParts, layout: ModelLayout, update: Update) -> None:
        """Hold what there is in this layout from now on."""
        self.parts, self.layout, self.update = parts, layout, update

    def slices(self, *, held: bool, lazily: bool = False) -> Iterator[ParamSlice]:
        """See `ZeroOptimizer.slices`."""
        self.update.collect_edits()
        run, states, where = self.parts.runtime, self.parts.states, self.update.moved.lying
        return iter_slices(run, self.layout, states, where=where, held=held, lazily=lazily)

    def part_of(self, name: str, *, whole: bool) -> tuple[LocalSlice, Callable[[], torch.Tensor]]:
        """The elements of a parameter that this rank owns, or all of one that every rank keeps (`whole`), and a
        function that reads them, 1-D, wherever they lie: in host memory after `offload_states`, on disk.
        """
        part, home = self.layout.part_of(name, whole=whole)
        return part, lambda: read_elements(home, part.offset, part.numel, self.update.moved.lying)

    def read(self, reader: Reader) -> SliceLoad:
        """See `ZeroOptimizer.read_slices`."""
        self.update.moved.check()
        self.update.abandon()
        self.update.check_model()
        run, states = self.parts.runtime, self.parts.states
        with self.parts.groups.masters():
            load = read_slices(run, self.layout, states, reader, from_masters=run.load_masters)
        load.call_when_installed(self.update.note_written)
        return load

    @torch.no_grad()
    def note_loaded(self) -> None:
        """Masters and frozen parameters were written where `layout.homes_of` has them: make that visible
        (collective).
        """
        publish_masters(self.parts.runtime)
        self.update.note_written()

    def local_state(self) -> dict[str, Any]:
        """See `ZeroOptimizer.state_dict`, where no function of torch asks."""
        inner: Any = self.parts.states.inner
        found = save_local(self.slices(held=True), inner.param_groups)
        if self.parts.runtime.stage > 0 or not hasattr(inner, "state_dict"):
            return found
        with self._members():
            whole = type(inner).state_dict(inner)
        for group, saved in zip(found["param_groups"], whole["param_groups"]):
            group["params"] = saved["params"]
        return {**found, "state": {number: self._lying(states) for number, states in whole["state"].items()}}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Load what `local_state` gave (collective)."""
        load_local(state, self.parts.states.inner.param_groups, partial(self.slices, held=True), self.read)

    def _lying(self, states: dict[str, Any]) -> dict[str, Any]:
        lying = self.update.moved.lying
        return {key: lying(value) if isinstance(value, torch.Tensor) else value for key, value in states.items()}

    @contextmanager
    def whole_states(self, asked: str) -> Iterator[None]:
        """Inside the context the inner optimizer's groups hold what its states belong to, in the places of the model's
        parameters.

        Raises:
            ZeroStateError: this rank's states are parts of tensors.
        """
        if self.parts.runtime.stage > 0:
            raise ZeroStateError(
                f"{asked}: the states of this optimizer are sharded over the ranks. With what dsx_zero.shard returned"
                " (an engine's engine.optimizer): dsx_zero.full_state_dict(optimizer) and load_full_state_dict, on"
                " every rank, for whole states; its state_dict() and load_state_dict() for this rank's part"
            )
        self.update.moved.check()
        with self._members():
            yield

    @contextmanager
    def _members(self) -> Iterator[None]:
        """Inside the context the inner optimizer's groups hold the masters of parameters."""
        groups, found = self.parts.groups, list[list[torch.Tensor]]()
        for group in groups.shown:
            masters = ((self.layout.master_of(p) or (None, ""))[0] for p in group)
            found.append([p if master is None else master for p, master in zip(group, masters)])
        with groups.masters(found):
            yield

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """See `ZeroOptimizer.state_bytes_by_tier`."""
        beside, apart = self.update.host_steps, self.update.runner.apart
        if beside is not None:
            beside.join()  # its thread moves states
        counted = count_bytes(self.parts.runtime, self.parts.states)
        counted["master"]["device"] = counted["master"].get("device", 0) + self.update.edits.nbytes()
        if beside is not None:
            counted["grads"]["host"] = counted["grads"].get("host", 0) + beside.kept.nbytes
        counted["params"]["host"] = counted["params"].get("host", 0) + apart.nbytes
        counted["optimizer"]["host"] = counted["optimizer"].get("host", 0) + apart.old_nbytes
        for kind, nbytes in self.update.moved.nbytes().items():
            counted[kind]["host"] = counted[kind].get("host", 0) + nbytes
        return {kind: {tier: n for tier, n in tiers.items() if n} for kind, tiers in counted.items()}
