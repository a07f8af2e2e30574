"""Stage 3: decides when the whole parameters of a unit are in memory. A use gathers them; after it they are freed.

A *use* is one forward of a unit's module. It holds the unit until the forward returns. In backward it holds the unit
again, from the gradient of its outputs until the gradient of one of its inputs is about to be passed on: autograd runs
nodes in the reverse order of their creation, so that every node of that forward has run by then. A use without such an
input (the first block of a model, the root) ends when all gradients of the unit are complete, at the latest when
backward ends.

Recomputation (activation checkpointing) is a forward inside a backward. It takes the unit and does not release it;
the backward that follows does. Recomputation may stop in the middle (torch's early stop), so no code depends on its
end.

``Order`` decides on the order of the collectives. ``GatherLifetime`` calls it, and it calls ``GatherExecutor``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..errors import ZeroStateError
from ..order.backward import BackwardClock
from ..order.protocol import Order
from ..order.schedule import Pass
from ..params.partitioned_unit import GatherOnUse, PartitionedUnit, UnitState
from ..params.tensors import tensors_in
from ..torch_names import current_graph_task_id
from .executor import GatherExecutor

__all__ = ["GatherLifetime", "Use"]


class Use:
    """One forward of a unit's module. Uses are compared by identity."""

    first_input_hooked = False


class GatherLifetime(GatherOnUse):
    """Turns events of modules and of autograd into needs of units. Its methods are the bodies of the hooks.

    It also serves operations outside of the units' modules (`GatherOnUse`).
    """

    def __init__(
        self,
        units: Sequence[PartitionedUnit],
        *,
        executor: GatherExecutor,
        order: Order,
        clock: BackwardClock,
    ) -> None:
        self._units = {unit.index: unit for unit in units}
        self._executor, self._order, self._clock = executor, order, clock
        self._depth, self._pass = 0, Pass.TRAINING
        self._open: dict[int, list[Use]] = {index: [] for index in self._units}
        self._backward: dict[int, set[Any]] = {index: set() for index in self._units}
        self._ends_with_gradients = {  # frozen parameters get no gradients; those of the root are complete too early
            unit.index for unit in units if unit.plan.users != ("",) and all(group.trainable for group in unit.groups)
        }
        self._borrowed: set[int] = set()
        self._in_backward = False
        """Whether a backward has begun whose units have not been released."""
        for unit in units:
            unit.gather_on_use = self
        clock.watch(self)

    # Forward ----------------------------------------------------------------------------------------------------------

    def before_forward(self, units: Sequence[int], inputs: Any, *, root: bool) -> None:
        """A module that uses ``units`` is about to run.

        Args:
            inputs: its arguments and keyword arguments.
            root: the module is the model itself, which is never inside another module.
        """
        recomputes = current_graph_task_id() != -1
        if recomputes:
            if not self._in_backward:
                self._clock.enter()
        else:
            if root or self._depth == 0:
                self._begin_forward()
            self._depth += 1
        for unit in units:
            target = self._units[unit]
            self._take(target, Pass.TRAINING if recomputes else self._pass)
            if recomputes:
                self._hold_in_backward(target, "recomputation")
            else:
                target.uses += 1
            use = Use()
            self._open[unit].append(use)
            if torch.is_grad_enabled() and target.plan.users != ("",):
                self._watch_inputs(unit, use, inputs)

    def _begin_forward(self) -> None:
        """The outermost forward begins."""
        if self._depth:  # an error ended the forward before, and the hooks were not called
            self._depth = 0
            self._abandon_forward()
        self._pass = Pass.TRAINING if torch.is_grad_enabled() else Pass.EVALUATION
        if self._in_backward:  # an error ended the backward before
            self._clock.forget()
            self._release_all()

    def after_forward(self, units: Sequence[int], output: Any, *, failed: bool) -> list[tuple[int, Use]]:
        """The module that uses ``units`` has returned.

        Args:
            output: what it returned; None if it failed.
            failed: it raised.

        Returns:
            The uses of the units that end here: pairs of a unit's index and a use.
        """
        inside_backward, uses = current_graph_task_id() != -1, []
        for unit in units:
            use = self._open[unit].pop() if self._open[unit] else Use()
            uses.append((unit, use))
            if torch.is_grad_enabled():
                self._watch_outputs(unit, use, output)
            if not inside_backward:
                self._end_use(self._units[unit])
        if not inside_backward and self._depth:  # (0 if another hook failed before this forward was entered)
            self._depth -= 1
            if self._depth == 0:
                self._end_forward(failed=failed)
        return uses

    def _end_forward(self, *, failed: bool) -> None:
        """The outermost forward has returned or failed."""
        for unit in self._borrowed:
            self._units[unit].uses -= 1
        self._borrowed.clear()
        if not failed:
            self._order.end_forward(during=self._pass)
            self._executor.settle()
        self._executor.sweep()

    def watch_item(self, uses: Sequence[tuple[int, Use]], item: Any) -> None:
        """An iterator that the module of these uses returned is about to return ``item``."""
        if torch.is_grad_enabled():
            for unit, use in uses:
                self._watch_outputs(unit, use, item)

    def _end_use(self, target: PartitionedUnit) -> None:
        """One use has ended. After the last one the unit is freed, unless it is kept for its next use."""
        target.uses = max(0, target.uses - 1)
        if target.uses:
            self._hide_borrowed(target)
        elif not target.stale and self._order.keeps(target.index):
            target.swap_out()  # a use in between goes through `gather_for_use`, which also prepares its backward
        else:
            self._executor.free(target.index)

    def _take(self, target: PartitionedUnit, during: Pass) -> None:
        """Gather the unit, if it is not gathered, and put its plain parameters into its modules."""
        if target.state is UnitState.GATHERED:
            if not target.uses:
                self._order.use(target.index)
            target.swap_in()
            return
        self._order.gather(target.index, during=during)
        self._executor.arrive(target.index)

    def _abandon_forward(self) -> None:
        for uses in self._open.values():
            uses.clear()
        self._borrowed.clear()
        self._executor.free_all()

    # Backward ---------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """See `BackwardWatcher`."""
        self._in_backward = True

    def before_backward(self, unit: int, use: Use, gradient: torch.Tensor) -> None:
        """The gradient of an output of ``use`` has been computed."""
        if not self._in_backward:
            self._clock.enter()
        if use not in self._backward[unit]:
            target = self._units[unit]
            self._take(target, Pass.TRAINING)
            self._hold_in_backward(target, use)

    def after_backward(self, unit: int, use: Use, gradient: torch.Tensor) -> None:
        """Every autograd node of ``use`` has run."""
        holds = self._backward[unit]
        if use in holds:
            holds.discard(use)
            holds.discard("recomputation")
            if not holds:
                self._end_use(self._units[unit])

    def gradients_complete(self, unit: int) -> None:
        """All gradients of the unit's parameters have been computed: a use without inputs to watch ends here."""
        holds = self._backward.get(unit)
        if not holds or unit not in self._ends_with_gradients:
            return
        for use in holds:
            if not isinstance(use, Use) or use.first_input_hooked:
                return
        holds.clear()
        self._end_use(self._units[unit])

    def _hold_in_backward(self, target: PartitionedUnit, token: Any) -> None:
        holds = self._backward[target.index]
        if not holds:
            target.uses += 1
        holds.add(token)

    def end_backward(self) -> None:
        """See `BackwardWatcher`."""
        self._clock.end_pass()
        self._executor.settle()
        self._release_all()

    def _release_all(self) -> None:
        self._in_backward = False
        for index, target in self._units.items():
            holds = self._backward[index]
            if holds:
                holds.clear()
                target.uses = max(0, target.uses - 1)
            if target.state is not UnitState.PARTITIONED:
                self._executor.discard(index)

    # Watching tensors -------------------------------------------------------------------------------------------------

    def _watch_outputs(self, unit: int, use: Use, output: Any) -> None:
        # A tensor alone, the usual case, needs no search.
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output, objects=True):
            if tensor.requires_grad:
                tensor.register_hook(partial(self.before_backward, unit, use))

    def _watch_inputs(self, unit: int, use: Use, inputs: Any) -> None:
        leaves: list[torch.Tensor] = []
        inner = False
        for tensor in tensors_in(inputs):
            if tensor.grad_fn is not None:
                inner = True
                tensor.register_hook(partial(self.after_backward, unit, use))
            elif tensor.requires_grad:
                leaves.append(tensor)
        use.first_input_hooked = inner or bool(leaves)
        if leaves and not inner:
            # Leaves (the inputs of a reentrant recomputation) get their gradients at different times: wait for all of
            # them.
            left = {id(tensor) for tensor in leaves}
            for tensor in leaves:
                tensor.register_hook(partial(self._leaf_done, unit, use, left, id(tensor)))

    def _leaf_done(self, unit: int, use: Use, left: set[int], key: int, grad: torch.Tensor) -> None:
        left.discard(key)
        if not left:
            self.after_backward(unit, use, grad)

    # Uses from outside ------------------------------------------------------------------------------------------------

    def gather_for_use(self, unit: PartitionedUnit) -> bool:
        """See ``GatherOnUse``."""
        backward = current_graph_task_id() != -1
        if self._depth == 0 and not backward:
            return False
        self._take(unit, Pass.TRAINING if backward else self._pass)
        if backward:
            if not self._in_backward:
                self._clock.enter()
            self._hold_in_backward(unit, "recomputation")
        else:
            if unit.index not in self._borrowed:
                self._borrowed.add(unit.index)
                unit.uses += 1
            self._hide_borrowed(unit)
        return True

    def _hide_borrowed(self, target: PartitionedUnit) -> None:
        """If a unit is gathered only for uses outside its modules, the next one must go through `gather_for_use`."""
        if target.uses == 1 and target.index in self._borrowed and not self._open[target.index]:
            target.swap_out()

    def discard(self, unit: PartitionedUnit) -> None:
        """See ``GatherOnUse``."""
        self._executor.discard(unit.index)

    def watch(self, unit: PartitionedUnit, output: Any) -> Any:
        """See ``GatherOnUse``. The unit is released when backward ends: the nodes that use the result are not known."""
        if torch.is_grad_enabled():
            self._watch_outputs(unit.index, Use(), output)
        return output

    @contextmanager
    def gathered(self, units: Sequence[int]) -> Iterator[None]:
        """Inside the context the units' whole parameters are in their modules. Collective."""
        taken: list[PartitionedUnit] = []
        try:
            for unit in dict.fromkeys(units):
                target = self._units[unit]
                self._take(target, Pass.OUTSIDE)
                target.uses += 1
                taken.append(target)
            yield
        finally:
            for target in taken:
                self._end_use(target)

    def join(self) -> None:
        """This rank has run the last of its forwards outside training.

        It takes part in those of the other ranks until all have finished. Collective.
        """
        self._order.join()
        self._executor.settle()
        self._executor.sweep()

    def free_gathered(self) -> None:
        """Free every unit that is gathered. Raises `ZeroStateError` inside a forward or backward."""
        if self._depth or self._in_backward:
            raise ZeroStateError(
                "gathered parameters cannot be freed inside a forward or backward; call it between them"
            )
        for index in self._units:
            self._executor.free(index)

    def parameters_changed(self) -> None:
        """The shards have new values (an optimizer step, a load): free the gathered units, which are stale."""
        changed = []
        for index, unit in self._units.items():
            if unit.state is not UnitState.PARTITIONED:
                self._executor.free(index)
            for store in unit.storages:
                changed.append(store.base)
        torch.autograd.graph.increment_version(changed)
        self._executor.shards_changed()
