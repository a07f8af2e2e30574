"""The step of an optimizer whose rule has a function of whole matrices, on equal slices of flat buffers.

Per rank set of buffers: every rank updates the states of the elements it owns; the pieces of what became of them travel
to the owners of the matrices (`plan/matrices.py`), packed in one all-to-all per round; the owners compute; a second
all-to-all brings the pieces of the results back, and every rank applies them to its masters. So each element travels
once in each direction, the states stay sharded like Adam's, and a matrix is computed by one rank, bitwise identical
whatever the number of ranks. While one round is computed, the messages of its neighbours are under way.

One rank alone sends nothing. At stage 0 all ranks have all elements, and the optimizer's own step is called, unless
these are slices of tensors (`sliced_matrices.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from dsx_comm import RankSet

from ..errors import ZeroOptimizerError
from ..params.flat import FlatGroup
from ..runtime import Runtime
from ..torch_names import foreach_mul_
from .masters import Masters
from .matrix_exchange import Exchange, TensorOfMatrices
from .matrix_rules import MatrixRule, matrix_rule, matrix_states
from .sliced_matrices import Cut, SliceSizes, tell_sizes

__all__ = ["MatrixStep"]


class MatrixStep:
    """Steps an optimizer by its rule.

    Args:
        inner: the optimizer.
        rule: its rule.
        masters: every trainable parameter with this rank's masters.
        numbers: the parameter group of each parameter that the optimizer holds, by `id`.
    """

    def __init__(
        self, inner: Any, rule: MatrixRule, runtime: Runtime, masters: Masters, numbers: Mapping[int, int]
    ) -> None:
        self._inner, self._rule = inner, rule
        self._exchanges: list[Exchange] = []
        self._known: dict[int, tuple[tuple[int, ...], Any]] = {}
        told = self._tell_sizes(runtime, numbers)
        mine = {id(parameter): own for parameter, own in masters}
        found: dict[tuple[RankSet, torch.device, torch.dtype, bool], list[TensorOfMatrices]] = {}
        for group in (group for unit in runtime.trainable_units() for group in unit.trainable):
            for name, shape, parameter in zip(group.layout.names, group.layout.shapes, group.parameters):
                number = numbers.get(id(parameter))
                if number is None:
                    continue
                self._known.setdefault(number, (shape, self._facts(number, shape, group.key.device)))
                settings = inner.param_groups[number]
                if rule.matrices(shape, settings):
                    own = mine[id(parameter)]
                    cut = Cut.of(name, group, rule, settings, told[name]) if group.ranks.tensor_groups else None
                    tensor = TensorOfMatrices(name, group, number, own[0] if own else None, cut)
                    dtype = rule.message_dtype(settings, group.key.device)
                    # Other ranks have other work with whole matrices of unequal stacks, and so other owners.
                    apart = name in told and cut is None and len(set(told[name])) > 1
                    found.setdefault((group.ranks, group.key.device, dtype, apart), []).append(tensor)
        self._devices = {number: group.key.device for number, group in _groups_of(found)}
        for (ranks, device, dtype, _), tensors in found.items():
            if ranks.tensor_groups:  # slices of unequal sizes may lie in another order on other ranks
                tensors.sort(key=lambda tensor: tensor.name)
            self._exchanges.append(Exchange(inner, rule, ranks, tensors, device, dtype, runtime.stage == 0))
        self._of_matrices = {
            id(tensor.master.tensor) for tensors in found.values() for tensor in tensors if tensor.master is not None
        }
        self._call = torch.optim.Optimizer.profile_hook_step(lambda optimizer: self._run())  # with the user's hooks

    def _tell_sizes(self, runtime: Runtime, numbers: Mapping[int, int]) -> dict[str, list[SliceSizes]]:
        """The sizes of the slices of every tensor with matrices, on all tensor-parallel ranks (collective over these).

        Raises:
            ZeroOptimizerError: slices cannot be joined, or are unequal where the rule keeps states of matrices.
        """
        mine, keeps = dict[RankSet, dict[str, SliceSizes]](), set[str]()
        for group in (group for unit in runtime.trainable_units() for group in unit.trainable):
            for name, shape, parameter in zip(group.layout.names, group.layout.shapes, group.parameters):
                number = numbers.get(id(parameter))
                settings = None if number is None else self._inner.param_groups[number]
                if settings is not None and group.ranks.tensor_groups and self._rule.matrices(shape, settings):
                    mine.setdefault(group.ranks, {})[name] = SliceSizes.of(name, group, settings)
                    keeps |= {name} if matrix_states(self._rule, shape, settings) else set()
        told: dict[str, list[SliceSizes]] = {}
        for ranks, sizes in mine.items():
            told |= tell_sizes(sizes, ranks.tensor_groups[0])
        for name, slices in told.items():
            if len(set(slices)) > 1 and name in keeps:
                raise ZeroOptimizerError(
                    f"{name}: got slices of the shapes {[one.shape for one in slices]} on the tensor-parallel ranks,"
                    f" expected equal ones for {type(self._inner).__name__}, whose states of whole matrices are divided"
                    " by them; pad the tensor, use Muon, or give it a group with use_muon=False"
                )
        return told

    @classmethod
    def of(cls, inner: Any, runtime: Runtime, masters: Masters, numbers: Mapping[int, int]) -> MatrixStep | None:
        """The step of this optimizer; None where its own `step` is called."""
        sets = {group.ranks for unit in runtime.trainable_units() for group in unit.trainable}
        divided = runtime.stage > 0 or any(ranks.tensor_groups for ranks in sets)
        rule = matrix_rule(inner) if divided else None
        return None if rule is None else cls(inner, rule, runtime, masters, numbers)

    def step(self, grads: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Step all masters in the optimizer's groups that have a `grad`, with `grads` times `factor` (collective).

        Raises:
            ZeroOptimizerError: settings would need other messages than were planned.
        """
        self._check()
        if grads and not (isinstance(factor, float) and factor == 1.0):  # a rank may own nothing
            foreach_mul_(grads, factor)
        self._call(self._inner)

    def take_part(self) -> None:
        """Exchange zeros, on a rank that steps nothing because something has failed before (collective)."""
        for exchange in self._exchanges:
            exchange.run(mine=False)

    def _run(self) -> None:
        for settings in self._inner.param_groups:
            for param in settings["params"]:
                if param.grad is not None and id(param) not in self._of_matrices:
                    self._rule.element_wise(param, param.grad, settings)
        for exchange in self._exchanges:
            exchange.run()

    def _facts(self, number: int, shape: tuple[int, ...], device: torch.device) -> Any:
        settings = self._inner.param_groups[number]
        dtype = self._rule.message_dtype(settings, device)
        return tuple(self._rule.matrices(shape, settings)), dtype, matrix_states(self._rule, shape, settings)

    def _check(self) -> None:
        for number, (shape, known) in self._known.items():
            now = self._facts(number, shape, self._devices.get(number, torch.device("cpu")))
            if now[0] != known[0] or (known[0] and now[1:] != known[1:]):
                raise ZeroOptimizerError(
                    f"param_groups[{number}] of {type(self._inner).__name__} was changed: a tensor of shape {shape} is"
                    f" (matrices, dtype) {_short(now)}, and it was {_short(known)} when the model was sharded; set what"
                    " the matrices are, the dtype they are computed in, and their rank before dsx_zero.shard"
                )


def _groups_of(found: Mapping[Any, Sequence[TensorOfMatrices]]) -> Iterator[tuple[int, FlatGroup]]:
    return ((tensor.number, tensor.group) for tensors in found.values() for tensor in tensors)


def _short(facts: Any) -> str:
    shapes, dtype, states = facts
    kept = "".join(f", {key} {state.shape}" for key, state in states.items())
    return f"({len(shapes)} of {shapes[0]}, {dtype}{kept})" if shapes else "none"
