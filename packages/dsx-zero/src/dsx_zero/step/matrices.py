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
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import dsx_comm
import torch
from dsx_comm import RankSet

from ..errors import ZeroOptimizerError
from ..params.flat import FlatGroup
from ..plan.layout import FlatLayout
from ..plan.matrices import Matrix, Piece, Round, rounds_of
from ..runtime import Runtime
from ..torch_names import foreach_copy_, foreach_mul_
from .masters import Master, Masters
from .matrix_rules import MatrixRule, matrix_rule
from .sliced_matrices import Cut, compute_sliced

__all__ = ["MatrixStep"]


@dataclass(frozen=True)
class _Tensor:
    """A parameter that consists of matrices, on any rank; `master` is this rank's part of it, if there is one."""

    name: str
    group: FlatGroup
    number: int
    master: Master | None
    cut: Cut | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.group.layout.shapes[self.group.layout.index(self.name)]

    @property
    def trains(self) -> bool:
        return self.group.parameters[self.group.layout.index(self.name)].requires_grad


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
        self._exchanges: list[_Exchange] = []
        self._known: dict[int, tuple[tuple[int, ...], Any]] = {}
        mine = {id(parameter): own for parameter, own in masters}
        found: dict[tuple[RankSet, torch.device, torch.dtype], list[_Tensor]] = {}
        for group in (group for unit in runtime.trainable_units() for group in unit.trainable):
            for name, shape, parameter in zip(group.layout.names, group.layout.shapes, group.parameters):
                number = numbers.get(id(parameter))
                if number is None:
                    continue
                self._known.setdefault(number, (shape, self._facts(number, shape, group.key.device)))
                settings = inner.param_groups[number]
                if rule.matrices(shape, settings):
                    own, cut = mine[id(parameter)], None
                    if group.ranks.tensor_groups:
                        size = dsx_comm.get_world_size(group.ranks.tensor_groups[0])
                        cut = Cut.of(name, runtime.model.get_parameter(name), shape, rule, settings, size)
                    tensor = _Tensor(name, group, number, own[0] if own else None, cut)
                    dtype = rule.message_dtype(settings, group.key.device)
                    found.setdefault((group.ranks, group.key.device, dtype), []).append(tensor)
        self._devices = {number: group.key.device for number, group in _groups_of(found)}
        for (ranks, device, dtype), tensors in found.items():
            self._exchanges.append(_Exchange(inner, rule, ranks, tensors, device, dtype, runtime.stage == 0))
        self._of_matrices = {
            id(tensor.master.tensor) for tensors in found.values() for tensor in tensors if tensor.master is not None
        }
        self._call = torch.optim.Optimizer.profile_hook_step(lambda optimizer: self._run())  # with the user's hooks

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
        return tuple(self._rule.matrices(shape, settings)), self._rule.message_dtype(settings, device)

    def _check(self) -> None:
        for number, (shape, known) in self._known.items():
            now = self._facts(number, shape, self._devices.get(number, torch.device("cpu")))
            if now[0] != known[0] or (known[0] and now[1] != known[1]):
                raise ZeroOptimizerError(
                    f"param_groups[{number}] of {type(self._inner).__name__} was changed: a tensor of shape {shape} is"
                    f" (matrices, dtype) {_short(now)}, and it was {_short(known)} when the model was sharded; set what"
                    " the matrices are, and the dtype they are computed in, before dsx_zero.shard"
                )


def _groups_of(found: Mapping[Any, Sequence[_Tensor]]) -> Iterator[tuple[int, FlatGroup]]:
    return ((tensor.number, tensor.group) for tensors in found.values() for tensor in tensors)


def _short(facts: tuple[tuple[tuple[int, int], ...], torch.dtype]) -> str:
    shapes, dtype = facts
    return f"({len(shapes)} of {shapes[0]}, {dtype})" if shapes else "none"


@dataclass
class _Message:
    """The buffers of one round, and the all-to-all that is under way."""

    there: torch.Tensor
    here: torch.Tensor
    work: Any = None

    def wait(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.wait()


@dataclass(frozen=True)
class _Plan:
    """The rounds for the parameters that train, with the places of pieces in the buffers.

    Attributes:
        sent: for each parameter, the pieces that this rank sends of it: (round, first element in the buffer, piece).
        received: by round, for each owned matrix: (matrix, (first element, elements) of its pieces).
    """

    matrices: tuple[Matrix, ...]
    rounds: tuple[Round, ...]
    sent: dict[int, list[tuple[int, int, Piece]]] = field(default_factory=dict)
    received: list[dict[int, list[tuple[int, int]]]] = field(default_factory=list)

    @classmethod
    def of(cls, matrices: Sequence[Matrix], rounds: tuple[Round, ...]) -> _Plan:
        plan = cls(tuple(matrices), rounds)
        for number, around in enumerate(rounds):
            offset = 0
            for piece in around.sends:
                plan.sent.setdefault(piece.place, []).append((number, offset, piece))
                offset += piece.numel
            places: dict[int, list[tuple[int, int]]] = {index: [] for index in around.owned}
            offset = 0
            for piece in around.receives:
                places[piece.matrix].append((offset, piece.numel))
                offset += piece.numel
            plan.received.append(places)
        return plan


class _Exchange:
    """The matrices of one rank set, whose pieces have one dtype and are computed on one device."""

    def __init__(
        self,
        inner: Any,
        rule: MatrixRule,
        ranks: RankSet,
        tensors: Sequence[_Tensor],
        device: torch.device,
        dtype: torch.dtype,
        whole: bool,
    ) -> None:
        self._inner, self._rule, self._ranks, self._tensors = inner, rule, ranks, tuple(tensors)
        self._device, self._dtype, self._whole = device, dtype, whole
        self._alone = whole or ranks.size == 1
        if sizes := {tensor.name: tensor.shape for tensor in tensors if tensor.cut is not None}:
            _check_alike(sizes, ranks.tensor_groups[0])
        self._planned: tuple[tuple[bool, ...], _Plan] | None = None

    def run(self, *, mine: bool = True) -> None:
        """Step the matrices (collective); without `mine` those of other ranks only."""
        plan = self._plan()
        messages = [
            _Message(self._buffer(sum(around.send_sizes)), self._buffer(sum(around.receive_sizes)))
            for around in plan.rounds
        ]
        if mine:
            self._begin(plan, messages)
        else:
            for message in messages:
                message.there.zero_()
        rounds = tuple(zip(plan.rounds, messages))
        for number, (around, message) in enumerate(rounds):
            if number == 0:
                self._send(around, message, back=False)
            if number + 1 < len(rounds):
                self._send(*rounds[number + 1], back=False)
            message.wait()
            self._compute(plan, number, message.here)
            self._send(around, message, back=True)
        for message in messages:
            message.wait()
        if mine:
            self._apply(plan, messages)

    def _plan(self) -> _Plan:
        """The plan for what trains now, which is the same on all ranks."""
        trains = tuple(tensor.trains for tensor in self._tensors)
        if self._planned is None or self._planned[0] != trains:
            matrices = [
                matrix
                for place, (tensor, train) in enumerate(zip(self._tensors, trains))
                if train
                for matrix in self._matrices(place, tensor)
            ]
            layouts = [(self._layout(tensor), tensor.name) for tensor in self._tensors]
            rank = 0 if self._alone else self._ranks.rank
            self._planned = trains, _Plan.of(matrices, rounds_of(matrices, layouts, rank))
        return self._planned[1]

    def _layout(self, tensor: _Tensor) -> FlatLayout:
        """The layout of the masters of a tensor: at stage 0 every rank has them all."""
        if not self._whole:
            return tensor.group.layout
        return FlatLayout.build([(tensor.name, tensor.shape)], world_size=1, itemsize=1)

    def _matrices(self, place: int, tensor: _Tensor) -> Iterator[Matrix]:
        settings, start, cut = self._inner.param_groups[tensor.number], 0, tensor.cut
        for rows, columns in self._rule.matrices(tensor.shape, settings) if cut is None else cut.tiles:
            work = self._rule.work((rows, columns), settings) if cut is None else cut.work
            yield Matrix(place, start, rows, columns, work)
            start += rows * columns

    def _buffer(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self._dtype, device=self._device)

    def _begin(self, plan: _Plan, messages: Sequence[_Message]) -> None:
        """Update this rank's states, and pack what becomes of them."""
        for place, tensor in enumerate(self._tensors):
            master = tensor.master
            if master is None or master.tensor.grad is None:
                continue
            settings = self._inner.param_groups[tensor.number]
            direction = self._rule.direction(master.tensor, master.tensor.grad, settings).reshape(-1)
            parts = [part for _, part in _in_order(plan, place, messages)]
            foreach_copy_(parts, direction.split([part.numel() for part in parts]))

    def _send(self, around: Round, message: _Message, *, back: bool) -> None:
        """Start the all-to-all of a round, to the owners or `back`."""
        if self._alone:
            (message.there if back else message.here).copy_(message.here if back else message.there)
            return
        source, target = (message.here, message.there) if back else (message.there, message.here)
        sizes = (around.send_sizes, around.receive_sizes) if back else (around.receive_sizes, around.send_sizes)
        message.work = dsx_comm.all_to_all_single(target, source, *sizes, group=self._ranks.group, async_op=True)

    def _compute(self, plan: _Plan, number: int, buffer: torch.Tensor) -> None:
        """Replace the pieces of the owned matrices by those of their updates."""
        sliced: list[tuple[list[torch.Tensor], torch.Tensor, _Tensor]] = []
        for index, places in plan.received[number].items():
            matrix = plan.matrices[index]
            pieces = [buffer[offset : offset + numel] for offset, numel in places]
            whole = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(matrix.rows, matrix.columns)
            tensor = self._tensors[matrix.place]
            if tensor.cut is not None:
                sliced.append((pieces, whole, tensor))
                continue
            _write(pieces, self._rule.of_matrix(whole, self._inner.param_groups[tensor.number]))
        cuts = [tensor.cut for _, _, tensor in sliced if tensor.cut is not None]

        def of_whole(place: int, whole: torch.Tensor) -> torch.Tensor:
            settings, parts = self._inner.param_groups[sliced[place][2].number], whole.split(cuts[place].matrix[0])
            return torch.cat([self._rule.of_matrix(part, settings) for part in parts])

        slices = [one for _, one, _ in sliced]
        updates = compute_sliced(slices, cuts, of_whole, self._ranks.tensor_groups[0]) if slices else []
        for (pieces, _, _), update in zip(sliced, updates):
            _write(pieces, update)

    def _apply(self, plan: _Plan, messages: Sequence[_Message]) -> None:
        """Apply the updates to this rank's masters."""
        for place, tensor in enumerate(self._tensors):
            master = tensor.master
            if master is None or master.tensor.grad is None:
                continue
            settings, values = self._inner.param_groups[tensor.number], master.tensor.detach().view(-1)
            found = _in_order(plan, place, messages)
            update = torch.cat([part for _, part in found]).to(values.device)
            start = 0
            for shape, same in groupby(found, key=lambda pair: pair[0] if tensor.cut is None else tensor.cut.matrix):
                stop = start + sum(part.numel() for _, part in same)
                self._rule.apply(values[start:stop], update[start:stop], shape, settings)
                start = stop


def _in_order(plan: _Plan, place: int, messages: Sequence[_Message]) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """The pieces of this rank's master of a tensor, as they follow each other there: (rows, columns) of the matrix,
    and the place in what is sent.
    """
    pieces = sorted(plan.sent.get(place, ()), key=lambda found: found[2].start)
    matrices = plan.matrices
    return [
        ((matrices[piece.matrix].rows, matrices[piece.matrix].columns),
         messages[number].there[offset : offset + piece.numel])
        for number, offset, piece in pieces
    ]  # fmt: skip


def _write(pieces: Sequence[torch.Tensor], update: torch.Tensor) -> None:
    foreach_copy_(pieces, update.reshape(-1).split([piece.numel() for piece in pieces]))


def _check_alike(shapes: Mapping[str, tuple[int, ...]], group: Any) -> None:
    """Raises ZeroOptimizerError if the slices of a tensor have other shapes on other ranks (collective)."""
    everyone: list[dict[str, tuple[int, ...]]] = [{}] * dsx_comm.get_world_size(group)
    dsx_comm.all_gather_object(everyone, dict(shapes), group=group)
    for name in dict.fromkeys(name for found in everyone for name in found):
        if len({found.get(name) for found in everyone}) > 1:
            raise ZeroOptimizerError(
                f"{name}: got slices of the shapes {[found.get(name) for found in everyone]} on the tensor-parallel"
                " ranks, expected one shape, in groups for Muon on all of them"
            )
