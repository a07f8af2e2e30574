"""Steps sub-groups on a thread of the host, while the main thread goes on and the parameters keep their values.

Where masters have memory of their own, they are updated there, and `StepRunner.run` writes the parameters from them.
In two cases no memory holds the new values until then: masters are on disk, or a parameter is its own master. There
the new values of the parameters wait in host memory (`NewValues`) for `run`: 2 bytes per element in 16-bit training, 4
in fp32. New masters and states on disk are stored at once; the transfers of one sub-group run beside the step of
another one, as the plan says.

Left out: who calls this, and when the result is valid (`during_backward`, `late`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from dsx_comm.lanes import HostLane

from ..params.flat import FlatGroup
from .inner import InnerStep
from .masters import Master, ReadGradients, gradients_of
from .model_check import Frozen
from .plan import StepPlan
from .states import OptimizerStates
from .transfers import SubGroupTransfers

__all__ = ["ApartSteps", "NewValues", "new_values_wait"]


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
        self.on_host_step: Callable[[int], AbstractContextManager[object]] = lambda sub_group: nullcontext()
        """Makes a context; each sub-group is stepped inside it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the new values that wait."""
        return sum(new.values.nbytes for waiting in list(self._waiting.values()) for new in waiting)

    def masters_in(self, number: int) -> tuple[Master, ...]:
        """The masters of a sub-group."""
        group = self.plan.sub_groups[number]
        return self._masters[group.start : group.stop]

    def step(self, numbers: Sequence[int], factor: float, inner_step: InnerStep, gradients: ReadGradients) -> None:
        """Step sub-groups, in this order, and write no parameter. Stores may still be under way on return: see `end`.

        Args:
            numbers: of the sub-groups.
            factor: the gradients are multiplied with it.
            inner_step: made by `InnerStep.for_twin`.
            gradients: reads the gradients.
        """
        moves = self.plan.moves
        try:
            for place, number in enumerate(numbers):
                for wanted in numbers[place : place + 1 + self.plan.pipeline.ahead]:
                    self._transfers.fetch(wanted, self.masters_in(wanted) if moves else ())
                self._step(number, factor, inner_step, gradients)
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

    def _step(self, number: int, factor: float, inner_step: InnerStep, gradients: ReadGradients) -> None:
        self._transfers.attach(number)
        masters = self.masters_in(number)
        grads = self._frozen.stepped(masters, gradients_of(masters, gradients))
        with _beside_parameters(masters):
            with self.on_host_step(number):
                inner_step.step(masters, grads, factor, self._members[number], by_flat=self._by_flat)
            waiting = [NewValues(m, _in_parameter_dtype(m)) for m in masters if new_values_wait(m.group)]
        if waiting:
            self._waiting[number] = waiting


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


def _in_parameter_dtype(master: Master) -> torch.Tensor:
    """The master's values as the parameter will have them. In fp32 they are the master's own buffer, which nothing
    else uses after its store.
    """
    return master.tensor.detach().view(-1).to(master.group.key.dtype)
