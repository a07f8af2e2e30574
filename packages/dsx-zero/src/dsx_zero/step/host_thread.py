"""Steps sub-groups on a thread of the host, while the main thread goes on and the parameters keep their values.

`ApartSteps` are the steps, and a `Worker` is the thread. Where masters have memory of their own, they are updated
there, and `StepRunner.run` writes the parameters from them. In two cases no memory holds the new values until then:
masters are on disk, or a parameter is its own master. There the new values of the parameters wait in host memory
(`NewValues`) for `run`: 2 bytes per element in 16-bit training, 4 in fp32. The transfers of one sub-group run beside
the step of another one, as the plan says.

A step may be undone (`keep_old`, `undo`): `OldValues` keeps a copy of what is in memory, and states on disk are written
beside the old ones. Both give back the very bits. An inverse of the update would not: it rounds.

Left out: who calls this, and when the result is valid (`host_step`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from dsx_comm.lanes import HostLane

from ..homes.stored import StoredHome
from ..params.flat import FlatGroup
from ..runtime import Runtime
from ..worker import Worker
from .inner import InnerStep, ReadGradients, gradients_of
from .masters import Master
from .model_check import Frozen
from .plan import StepPlan
from .states import OptimizerStates
from .transfers import SubGroupTransfers

__all__ = ["ApartSteps", "NewValues", "OldValues", "new_values_wait", "worker_beside"]


def worker_beside(runtime: Runtime) -> Worker:
    """A thread for the CPU optimizer step of a model."""
    device = next((group.key.device for u in runtime.trainable_units() for group in u.trainable), "cpu")
    return Worker(torch.device(device), "dsx-zero-step")


class _Old:
    """One master and its states from before a step."""

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}
        """Copies; they are used again in later steps. The master's own values have the name ""."""
        self.tensors: dict[str, torch.Tensor] = {}
        """The tensors that were copied, which are those of the optimizer."""
        self.others: dict[str, Any] = {}
        self.homes: frozenset[str] = frozenset()
        """The names of the states that had homes."""

    def copy(self, key: str, tensor: torch.Tensor) -> None:
        found = self.memory.get(key)
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            found = self.memory[key] = torch.empty_like(tensor)
        found.copy_(tensor)
        self.tensors[key] = tensor


class OldValues:
    """The values that a step changes, from before it, so that it can be undone: every bit, also of states that are no
    tensors.

    Masters and states in memory are copied. What is stored in a `StoredHome` stays where it is: new values are written
    beside it until `settle`.

    Args:
        states: the states of the optimizer.
    """

    def __init__(self, states: OptimizerStates) -> None:
        self._states = states
        self._of: dict[int, _Old] = {}
        self._kept: dict[int, Master] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(tensor.nbytes for old in list(self._of.values()) for tensor in list(old.memory.values()))

    def keep(self, master: Master) -> None:
        """Remember a master and its states, which are about to be stepped."""
        key, home = id(master.tensor), master.group.master
        old = self._of.setdefault(key, _Old())
        old.tensors, old.others, old.homes = {}, {}, frozenset(self._states.homes_of(master))
        for stored in self._stored_homes(master):
            stored.hold()
        if home is not None and home.view() is not None and not new_values_wait(master.group):
            old.copy("", master.tensor.detach())
        away = self._states.stored(master)
        for name, value in self._states.inner.state.get(master.tensor, {}).items():
            if name in away:
                continue
            if isinstance(value, torch.Tensor):
                old.copy(name, value.detach())
                old.tensors[name] = value
            else:
                old.others[name] = copy.deepcopy(value)
        self._kept[key] = master

    def undo(self) -> None:
        """Give everything that was kept its old value."""
        for key, master in self._kept.items():
            old, state = self._of[key], self._states.inner.state
            for name, tensor in old.tensors.items():
                tensor.detach().copy_(old.memory[name])
            if master.tensor in state:
                entries = state[master.tensor]
                entries.clear()
                entries.update({name: t for name, t in old.tensors.items() if name and name not in old.homes})
                entries.update(old.others)
            self._states.forget_homes(master, keep=old.homes)
            self._settle(master, keep=False)
        self._kept.clear()

    def settle(self) -> None:
        """The step is valid: the new values stay, and the copies may be overwritten."""
        for master in self._kept.values():
            self._settle(master, keep=True)
        self._kept.clear()

    def drop(self) -> None:
        """Let go of the copies."""
        self._of.clear()

    def _settle(self, master: Master, *, keep: bool) -> None:
        for home in self._stored_homes(master):
            home.settle(keep=keep)

    def _stored_homes(self, master: Master) -> list[StoredHome]:
        homes = [master.group.master, *self._states.stored(master).values()]
        return [home for home in homes if isinstance(home, StoredHome)]


@dataclass(frozen=True)
class NewValues:
    """New values of a master's part of a parameter, 1-D, in the parameter's dtype and in host memory."""

    master: Master
    values: torch.Tensor


def new_values_wait(group: FlatGroup) -> bool:
    """Do new values of the group's parameters wait in memory of their own, if it is stepped apart?"""
    home = group.own_master
    return home is None or home.view() is None


class ApartSteps:
    """Steps sub-groups on a thread of the host while the parameters keep their values.

    One thread at a time calls it; it uses nothing that `StepRunner.run` changes.

    Args:
        masters: the tensors that the optimizer steps, in layout order.
        plan: the sub-groups, none of which spans two units, and how far their transfers run beside the step.
        members: for each sub-group and parameter group, the masters in both.
        by_flat: call `step_flat` of the optimizer for one master after the other.
    """

    def __init__(
        self,
        masters: Sequence[Master],
        *,
        plan: StepPlan,
        frozen: Frozen,
        states: OptimizerStates,
        members: Sequence[list[list[torch.Tensor]]],
        by_flat: bool,
    ) -> None:
        self.plan, self._masters, self._frozen = plan, tuple(masters), frozen
        self._members, self._by_flat = members, by_flat
        lane = HostLane()  # one of its own: the main thread's lane may be a stream of the device
        self._transfers = SubGroupTransfers(states, lane, behind=plan.pipeline.behind)
        self._waiting: dict[int, list[NewValues]] = {}
        self._blocks = states.blocks
        self._old = OldValues(states)
        own = {m.group: m.group.master for m in masters if m.group.own_master is None}
        self._parameters_on_disk = [home for home in own.values() if isinstance(home, StoredHome)]
        self.on_host_step: Callable[[int], AbstractContextManager[object]] = lambda sub_group: nullcontext()
        """Makes a context; each sub-group is stepped inside it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the new values that wait."""
        return sum(new.values.nbytes for waiting in list(self._waiting.values()) for new in waiting)

    @property
    def old_nbytes(self) -> int:
        """Bytes of the copies by which a step can be undone."""
        return self._old.nbytes

    def masters_in(self, number: int) -> tuple[Master, ...]:
        """The masters of a sub-group."""
        group = self.plan.sub_groups[number]
        return self._masters[group.start : group.stop]

    def step(
        self,
        numbers: Sequence[int],
        factor: float,
        inner_step: InnerStep,
        gradients: ReadGradients,
        *,
        keep_old: bool = False,
    ) -> None:
        """Step sub-groups, in this order, and write no parameter. Stores may still be under way on return: see `end`.

        Args:
            numbers: of the sub-groups.
            factor: the gradients are multiplied with it.
            inner_step: made by `InnerStep.for_twin`.
            gradients: reads the gradients.
            keep_old: `undo` will be able to undo this step.
        """
        moves = self.plan.moves
        try:
            for place, number in enumerate(numbers):
                for wanted in numbers[place : place + 1 + self.plan.pipeline.ahead]:
                    self._transfers.fetch(wanted, self.masters_in(wanted) if moves else ())
                self._step(number, factor, inner_step, gradients, keep_old)
                self._transfers.store(number)
        except BaseException:
            self._transfers.abandon()
            raise

    def end(self) -> None:
        """Wait until all masters and states are stored."""
        self._transfers.wait()

    def take(self, number: int) -> list[NewValues]:
        """The new values of a sub-group that wait; they are handed over."""
        return self._waiting.pop(number, [])

    def forget(self) -> None:
        """Drop all new values: masters, states and parameters are about to get others."""
        self._waiting.clear()
        self._transfers.abandon()
        self._settle_parameters(keep=False)

    def undo(self) -> None:
        """Undo every step since `settle` that was made with `keep_old`; nothing of them is left. `end` comes before."""
        self._waiting.clear()
        self._transfers.abandon()
        self._old.undo()

    def settle(self) -> None:
        """The steps made with `keep_old` or after `hold_parameters` are valid, and will not be undone."""
        self._old.settle()
        self._settle_parameters(keep=True)

    def hold_parameters(self) -> None:
        """Until `settle`, parameters on disk that are their own masters keep their values: what is stored meanwhile is
        written beside them, so that forwards do not read it.
        """
        for home in self._parameters_on_disk:
            home.hold()

    def _settle_parameters(self, *, keep: bool) -> None:
        for home in self._parameters_on_disk:
            home.settle(keep=keep)

    def drop_copies(self) -> None:
        """Let go of the memory for copies of old values."""
        self._old.drop()

    def _step(
        self, number: int, factor: float, inner_step: InnerStep, gradients: ReadGradients, keep_old: bool
    ) -> None:
        self._transfers.attach(number)
        masters = self.masters_in(number)
        grads = self._frozen.stepped(masters, gradients_of(masters, gradients))
        if keep_old:
            for master in masters:
                self._old.keep(master)
        with _beside_parameters(masters):
            with self.on_host_step(number):
                inner_step.step(masters, grads, factor, self._members[number], by_flat=self._by_flat)
            waiting = [NewValues(m, self._in_parameter_dtype(m)) for m in masters if new_values_wait(m.group)]
        if waiting:
            self._waiting[number] = waiting

    def _in_parameter_dtype(self, master: Master) -> torch.Tensor:
        """The master's values as the parameter will have them. In fp32 they are the master's own buffer, which nothing
        else uses after its store.
        """
        return self._blocks.converted(master.tensor.detach().view(-1), master.group.key.dtype)


@contextmanager
def _beside_parameters(masters: Sequence[Master]) -> Iterator[None]:
    """Inside the context, masters that are memory of the parameters have copies of it, which the step changes."""
    homes = [m.group.master for m in masters]
    shared = [
        (m.tensor, m.tensor.data)
        for m, home in zip(masters, homes)
        if m.group.own_master is None and home is not None and home.view() is not None
    ]
    try:
        for tensor, values in shared:
            tensor.data = values.clone()
        yield
    finally:
        for tensor, values in shared:
            tensor.data = values
