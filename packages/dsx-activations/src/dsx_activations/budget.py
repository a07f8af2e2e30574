"""A budget in bytes for activations: the first forward pass is measured, then the blocks to recompute are chosen.

    budget = apply_memory_budget(model, 0.5)     # half of what would be kept without recomputation
    ... first step ...
    print(budget.choice)

Blocks are the units of ZeRO (children of `nn.ModuleList`s, leaf modules). For each block the ranks take the largest
bytes and times among them, so that all make the same choice. Tensors that the model saves outside of blocks count in
the budget, but cannot be recomputed.

The choice is made for the shapes of the measured pass. Larger shapes need more memory; call `measure_again` for them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dsx_comm
import torch
from dsx_core import with_code
from dsx_core.modules import CallingHook, block_names
from torch import nn

from .blocks import recompute_modules
from .errors import ActivationArgumentError, ActivationConfigError
from .measured import Measurement
from .plan import BlockCost, Choice, Selective, choose
from .settings import PATH

__all__ = ["MemoryBudget", "apply_memory_budget", "check_budget"]

_log = logging.getLogger("dsx_activations")
_MICROSECOND = 1e-6


def check_budget(budget: Any) -> int | float:
    """A budget as it may be written: bytes above 1, or a fraction.

    Raises:
        ActivationConfigError: it is neither.
    """
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if not number or not 0 < budget < float("inf") or (budget > 1 and budget != int(budget)):
        raise ActivationConfigError(
            f"{PATH}.memory_budget", f"got {budget!r}, expected bytes (a whole number) or a fraction between 0 and 1"
        )
    return int(budget) if budget > 1 else float(budget)


class MemoryBudget:
    """Measures a model's next forward pass in training, decides, and recomputes from then on. Made by
    `apply_memory_budget`.

    Attributes:
        choice: the decision; None before it.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: int | float,
        *,
        names: Sequence[str],
        group: Any,
        announce: Callable[[str], None],
        operators: bool = True,
    ) -> None:
        self._model, self._names, self._group, self._announce = model, tuple(names), group, announce
        self.budget, self._operators = check_budget(budget), operators
        self.choice: Choice | None = None
        self._measurement: Measurement | None = None
        self._end: Callable[[], None] = lambda: None
        self._warned = False
        before, after = CallingHook(self._before), CallingHook(self._after)
        self._handles = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after, always_call=True),
        ]

    def measure_again(self) -> None:
        """Decide again after the next forward pass in training; every rank calls it."""
        self._end()
        self._end, self.choice = (lambda: None), None

    def remove(self) -> None:
        """Recompute nothing any more, and take the hooks off."""
        self.measure_again()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def state_dict(self) -> dict[str, Any]:
        """The decision as plain values, for a checkpoint: a resumed training does not measure again."""
        found = None if self.choice is None else dataclasses.asdict(self.choice)
        return {"budget": self.budget, "blocks": list(self._names), "choice": found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Use a saved decision. If it was made for another budget or other blocks, it is ignored: the next forward is
        measured.
        """
        self.measure_again()
        found = state.get("choice")
        if found is None or state.get("budget") != self.budget or tuple(state.get("blocks", ())) != self._names:
            return
        names = {key: tuple(found.get(key, ())) for key in ("recomputed", "selected")}
        self._take(Choice(**{**found, **names}))

    # - One forward pass

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.choice is None and self._measurement is None and torch.is_grad_enabled() and module.training:
            self._measurement = Measurement(self._model, self._names, operators=self._operators)
            self._measurement.begin()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        measurement, self._measurement = self._measurement, None
        if measurement is None:
            return
        costs, outside = measurement.end()
        if output is None:  # an exception passes through
            return
        found = self._agreed({cost.name: cost for cost in costs}, outside)
        if found is not None:
            self._decide(*found)

    def _agreed(self, costs: Mapping[str, BlockCost], outside: int) -> tuple[list[BlockCost], int] | None:
        """The largest bytes and times among the ranks; None where a rank left blocks out. Times are whole microseconds,
        whose sums are the same everywhere.
        """
        order = [*costs, *(name for name in self._names if name not in costs)]
        table = [_row(costs.get(name, BlockCost(name, 0, 0, 0.0))) for name in order]
        table.append([outside, int(len(costs) < len(order)), *[0] * (len(table[0]) - 2)])
        if dsx_comm.is_initialized() and dsx_comm.get_world_size(self._group) > 1:
            device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
            values = torch.tensor(table, dtype=torch.int64, device=device)
            dsx_comm.all_reduce(values, op=dsx_comm.ReduceOp.MAX, group=self._group)
            table = values.tolist()
        *found, (outside, incomplete, *_) = table
        if incomplete:
            if not self._warned:
                self._warned = True
                missing = [name for name in self._names if name not in costs]
                text = (
                    "%s.memory_budget: nothing is decided, because blocks (%s, ...) were not called as modules in the"
                    " forward pass; a model that is compiled as a whole does not call them: compile the blocks"
                    " (compile_units, engine.compile)"
                )
                _log.warning(with_code(text, "DSX357"), PATH, missing[0] if missing else "on another rank")
            return None
        return [_cost(name, row) for name, row in zip(order, found)], outside

    def _decide(self, costs: Sequence[BlockCost], outside: int) -> None:
        budget = self.budget
        if isinstance(budget, float):
            budget = int(budget * choose(costs, 0, outside=outside).peak_of_all_kept)
        self._take(choose(costs, budget, outside=outside))

    def _take(self, choice: Choice) -> None:
        self.choice = choice
        self._end = recompute_modules(self._model, choice.recomputed, keeping_operators=choice.selected)
        self._announce(str(choice))
        if not choice.fits:
            text = (
                "%s.memory_budget: %d bytes cannot be held, even with every block recomputed the peak is %d bytes; use"
                " smaller micro-batches, or a budget of at least that"
            )
            _log.warning(with_code(text, "DSX356"), PATH, choice.budget, choice.peak)


def _row(cost: BlockCost) -> list[int]:
    """A cost as whole numbers; the ranks take the largest of each."""
    some = cost.selective or Selective(0, 0, 0.0)
    return [
        *(cost.kept, cost.inputs, _microseconds(cost.seconds), cost.outside),
        *(int(cost.selective is None), some.kept, some.alive, _microseconds(some.seconds)),
    ]


def _cost(name: str, row: Sequence[int]) -> BlockCost:
    kept, inputs, seconds, outside, without, some_kept, alive, some_seconds = row
    some = None if without else Selective(some_kept, alive, some_seconds * _MICROSECOND)
    return BlockCost(name, kept, inputs, seconds * _MICROSECOND, outside, some)


def _microseconds(seconds: float) -> int:
    return round(seconds / _MICROSECOND)


def apply_memory_budget(
    model: nn.Module,
    budget: int | float,
    *,
    blocks: Sequence[str] | None = None,
    group: Any = None,
    announce: Callable[[str], None] | None = None,
    operators: bool = True,
) -> MemoryBudget:
    """Hold the activations of a model within a budget, at the least time for recomputation.

    The first forward pass in training is measured (every block runs four times in it, and is recomputed) and decides,
    for each block, whether everything is kept, the inputs, or the inputs and the results of matrix products,
    convolutions and attention.

    Args:
        model: the model, before or after `shard`.
        budget: bytes, or a fraction of what is kept without recomputation (at most 1).
        blocks: names of the modules that may be recomputed, none inside another; None: the units of ZeRO.
        group: process group whose ranks run the same blocks and make the same choice; None: all ranks.
        announce: is called with the decision as text; None: the logger `dsx_activations`.
        operators: False: a block is recomputed completely, or not at all.

    Raises:
        ActivationConfigError: the budget is neither bytes nor a fraction.
        ActivationArgumentError: the model has no blocks, or one of the names is not the name of a module.
    """
    check_budget(budget)
    names = block_names(model) if blocks is None else tuple(blocks)
    known = dict(model.named_modules())
    if not names or any(name not in known for name in names):
        raise ActivationArgumentError(
            f"{PATH}.memory_budget: got blocks {list(names)}, expected names of modules of the model; blocks are the"
            " children of nn.ModuleLists, or what set_z3_leaf_module marks; name others with"
            " apply_memory_budget(blocks=[...])"
        )
    return MemoryBudget(
        model,
        budget,
        names=names,
        group=group,
        announce=announce or (lambda text: _log.info("%s", text)),
        operators=operators,
    )
