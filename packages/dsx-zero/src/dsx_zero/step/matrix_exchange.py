"""The messages of matrices: one all-to-all to their owners per round, the owners' arithmetic, and one back.

Where masters lie in page-locked host memory, their pieces are packed there, and a message crosses to the device and
back as one copy; the host waits for the copies back once. From memory that is not locked each piece is copied alone.

A rule may keep states of a matrix, and give two results (`matrix_rules.py`). Each piece of a matrix travels with its
range of the states, and comes back with the results; `plan/matrices.py` has the places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any

import dsx_comm
import torch
from dsx_comm import RankSet
from dsx_core.device import Device

from ..params.flat import FlatGroup
from ..plan.layout import FlatLayout
from ..plan.matrices import Matrix, Piece, Round, rounds_of
from ..torch_names import foreach_copy_
from .masters import Master
from .matrix_rules import MatrixRule, Settings, StatefulRule, stateful
from .sliced_matrices import Cut, Slice, compute_sliced

__all__ = ["Exchange", "TensorOfMatrices"]


@dataclass(frozen=True)
class TensorOfMatrices:
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


@dataclass
class _Message:
    """The buffers of one round, and the all-to-all that is under way: what goes `there` arrives `here`, and what is
    answered `here` comes back `there`. Where as much comes back, the same memory serves twice. Masters are packed and
    unpacked in the same memory, or in host memory where they are.
    """

    there: torch.Tensor
    here: torch.Tensor
    answer: torch.Tensor
    back: torch.Tensor
    packed: torch.Tensor
    unpacked: torch.Tensor
    work: Any = None

    def wait(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.wait()


@dataclass(frozen=True)
class _Place:
    """A piece, with its round and its first elements in the messages to the owner and back."""

    piece: Piece
    number: int
    there: int
    back: int

    def sent(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of the message to the owner: elements, and ranges of states."""
        parts = self.piece.parts
        return buffer[self.there : self.there + sum(parts)].split(parts)

    def returned(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of the message back: elements of each result, and ranges of states."""
        parts = self.piece.parts_back
        return buffer[self.back : self.back + sum(parts)].split(parts)


@dataclass(frozen=True)
class _Plan:
    """The rounds for the parameters that train, with the places of pieces in the buffers.

    Attributes:
        sent: for each parameter, the pieces that this rank sends of it, in the parameter's order.
        received: by round, for each owned matrix, its pieces.
    """

    matrices: tuple[Matrix, ...]
    rounds: tuple[Round, ...]
    sent: dict[int, list[_Place]] = field(default_factory=dict)
    received: list[dict[int, list[_Place]]] = field(default_factory=list)

    @classmethod
    def of(cls, matrices: Sequence[Matrix], rounds: tuple[Round, ...]) -> _Plan:
        plan = cls(tuple(matrices), rounds)
        for number, around in enumerate(rounds):
            for place in _places(number, around.sends):
                plan.sent.setdefault(place.piece.place, []).append(place)
            places: dict[int, list[_Place]] = {index: [] for index in around.owned}
            for place in _places(number, around.receives):
                places[place.piece.matrix].append(place)
            plan.received.append(places)
        for found in plan.sent.values():
            found.sort(key=lambda place: place.piece.start)
        return plan


def _places(number: int, pieces: Sequence[Piece]) -> Iterator[_Place]:
    there = back = 0
    for piece in pieces:
        yield _Place(piece, number, there, back)
        there, back = there + sum(piece.parts), back + sum(piece.parts_back)


class Exchange:
    """The matrices of one rank set, whose pieces have one dtype and are computed on one device."""

    def __init__(
        self,
        inner: Any,
        rule: MatrixRule,
        ranks: RankSet,
        tensors: Sequence[TensorOfMatrices],
        device: torch.device,
        dtype: torch.dtype,
        whole: bool,
    ) -> None:
        self._inner, self._rule, self._ranks, self._tensors = inner, rule, ranks, tuple(tensors)
        self._device, self._dtype, self._whole = device, dtype, whole
        self._alone = whole or ranks.size == 1
        self._staged = device.type == "cuda" and all(
            tensor.master.tensor.is_pinned() for tensor in tensors if tensor.master is not None
        )
        self._keeps = stateful(rule)
        self._results = 2 if self._keeps is not None and self._keeps.feeds_back else 1
        self._planned: tuple[tuple[bool, ...], _Plan] | None = None

    def run(self, *, mine: bool = True) -> None:
        """Step the matrices (collective); without `mine` those of other ranks only."""
        plan = self._plan()
        messages = [self._message(around) for around in plan.rounds]
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
            self._compute(plan, number, message)
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

    def _layout(self, tensor: TensorOfMatrices) -> FlatLayout:
        """The layout of the masters of a tensor: at stage 0 every rank has them all."""
        if not self._whole:
            return tensor.group.layout
        return FlatLayout.build([(tensor.name, tensor.shape)], world_size=1, itemsize=1)

    def _matrices(self, place: int, tensor: TensorOfMatrices) -> Iterator[Matrix]:
        settings, start, cut = self._inner.param_groups[tensor.number], 0, tensor.cut
        tiles = self._rule.matrices(tensor.shape, settings) if cut is None else cut.tiles
        for tile, (rows, columns) in enumerate(tiles):
            if cut is None:
                work = self._rule.work((rows, columns), settings)
                ranges = [(0, prod(shape)) for shape in self._states((rows, columns), settings).values()]
            else:
                work = cut.work
                ranges = [cut.range_of(state, tile, cut.rank) for state in range(len(cut.states))]
            sizes, before = tuple(stop - first for first, stop in ranges), tuple(first for first, _ in ranges)
            yield Matrix(place, start, rows, columns, work, sizes, before, self._results)
            start += rows * columns

    def _states(self, matrix: tuple[int, int], settings: Settings) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the states of a matrix, by name."""
        return {} if self._keeps is None else self._keeps.matrix_states(matrix, settings)

    def _message(self, around: Round) -> _Message:
        def buffer(sizes: Sequence[int]) -> torch.Tensor:
            return torch.empty(sum(sizes), dtype=self._dtype, device=self._device)

        there, here = buffer(around.send_sizes), buffer(around.receive_sizes)
        answer, back = here, there
        if (around.back_sizes, around.reply_sizes) != (around.send_sizes, around.receive_sizes) or self._results > 1:
            answer, back = buffer(around.reply_sizes), buffer(around.back_sizes)
        if not self._staged:
            return _Message(there, here, answer, back, there, back)
        packed, unpacked = (
            torch.empty(one.numel(), dtype=one.dtype, pin_memory=True, device="cpu") for one in (there, back)
        )
        return _Message(there, here, answer, back, packed, unpacked)

    def _stepped(self) -> Iterator[tuple[int, TensorOfMatrices, Master, Settings]]:
        """This rank's masters that are stepped now."""
        for place, tensor in enumerate(self._tensors):
            master = tensor.master
            if master is not None and master.tensor.grad is not None:
                yield place, tensor, master, self._inner.param_groups[tensor.number]

    def _begin(self, plan: _Plan, messages: Sequence[_Message]) -> None:
        """Update this rank's states, and pack what becomes of them, and its ranges of matrices' states."""
        for place, _, master, settings in self._stepped():
            direction = self._rule.direction(master.tensor, master.tensor.grad, settings).reshape(-1)
            found = plan.sent.get(place, ())
            parts = [one.sent(messages[one.number].packed) for one in found]
            foreach_copy_([part[0] for part in parts], direction.split([part[0].numel() for part in parts]))
            for number, state in enumerate(self._states_of(plan, place, master, settings)):
                ranges = [part[number + 1] for part in parts]
                foreach_copy_(ranges, state.view(-1).split([part.numel() for part in ranges]))
        for message in messages if self._staged else ():
            message.there.copy_(message.packed, non_blocking=True)

    def _states_of(self, plan: _Plan, place: int, master: Master, settings: Settings) -> list[torch.Tensor]:
        """This rank's ranges of the states of a tensor's matrices, which are made for the first step."""
        if self._keeps is None:
            return []
        pieces, kept = [one.piece for one in plan.sent.get(place, ())], self._inner.state[master.tensor]
        matrices, cut = [plan.matrices[piece.matrix] for piece in pieces], self._tensors[place].cut
        shapes = [
            [self._states(matrix, settings) for matrix in ((one.shape,) if cut is None else cut.matrices)]
            for one in matrices
        ]
        for number, key in enumerate(shapes[0][0] if shapes else ()):
            if key not in kept:
                kept[key] = torch.cat([
                    _initial(
                        self._keeps, key, [one[key] for one in of],
                        [one.before[number] + edge for edge in piece.states[number]], settings, master.tensor.device
                    )
                    for piece, one, of in zip(pieces, matrices, shapes)
                ])  # fmt: skip
        return [kept[key] for key in (shapes[0][0] if shapes else ())]

    def _send(self, around: Round, message: _Message, *, back: bool) -> None:
        """Start the all-to-all of a round, to the owners or `back`."""
        source, target = (message.answer, message.back) if back else (message.there, message.here)
        if self._alone:
            target.copy_(source)
            return
        sizes = (around.back_sizes, around.reply_sizes) if back else (around.receive_sizes, around.send_sizes)
        message.work = dsx_comm.all_to_all_single(target, source, *sizes, group=self._ranks.group, async_op=True)

    def _compute(self, plan: _Plan, number: int, message: _Message) -> None:
        """Answer for the owned matrices."""
        sliced: list[tuple[Slice, list[tuple[torch.Tensor, ...]], TensorOfMatrices]] = []
        for index, places in plan.received[number].items():
            matrix = plan.matrices[index]
            arrived = [place.sent(message.here) for place in places]
            answers = [place.returned(message.answer) for place in places]
            whole = _joined([parts[0] for parts in arrived]).view(matrix.shape)
            tensor = self._tensors[matrix.place]
            settings = self._inner.param_groups[tensor.number]
            if tensor.cut is not None:
                states_here = tuple(
                    _joined([parts[place + 1] for parts in arrived]) for place in range(len(matrix.states))
                )
                tile = matrix.start // (matrix.rows * matrix.columns)
                sliced.append((Slice(tensor.cut, tile, whole, states_here), answers, tensor))
            elif self._keeps is None:
                _write([parts[0] for parts in answers], self._rule.of_matrix(whole, settings))
            else:
                shapes = self._states(matrix.shape, settings)
                states = {
                    key: _joined([parts[place + 1] for parts in arrived]).view(shape)
                    for place, (key, shape) in enumerate(shapes.items())
                }
                for place, result in enumerate((*self._results_of(whole, settings, states), *states.values())):
                    _write([parts[place] for parts in answers], result)
        self._compute_sliced(sliced)

    def _results_of(
        self, matrix: torch.Tensor, settings: Settings, states: Mapping[str, torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        if self._keeps is None:
            return (self._rule.of_matrix(matrix, settings),)
        found = self._keeps.of_matrix(matrix, settings, states)
        return found if self._keeps.feeds_back else (found,)

    def _compute_sliced(self, sliced: Sequence[tuple[Slice, list[tuple[torch.Tensor, ...]], TensorOfMatrices]]) -> None:
        def of_whole(number: int, whole: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
            one, _, tensor = sliced[number]
            settings, found, rest = self._inner.param_groups[tensor.number], [], states
            for matrix, part in zip(one.cut.matrices, whole.split([rows for rows, _ in one.cut.matrices])):
                shapes = self._states(matrix, settings)
                views = {key: state[: prod(shape)].view(shape) for state, (key, shape) in zip(rest, shapes.items())}
                rest = [state[prod(shape) :] for state, shape in zip(rest, shapes.values())]
                found.append(self._results_of(part, settings, views))
            return [torch.cat(list(results)) for results in zip(*found)]

        slices = [one for one, _, _ in sliced]
        answered = compute_sliced(slices, of_whole, self._results, self._ranks.tensor_groups[0]) if slices else []
        for (_, answers, _), results in zip(sliced, answered):
            for place, result in enumerate(results):
                _write([parts[place] for parts in answers], result)

    def _apply(self, plan: _Plan, messages: Sequence[_Message]) -> None:
        """Apply the updates to this rank's masters, and take their second results and their states."""
        if self._staged and messages:
            for message in messages:
                message.unpacked.copy_(message.back, non_blocking=True)
            if (event := Device.of(self._device).event()) is not None:
                event.synchronize()
        for place, tensor, master, settings in self._stepped():
            values, found = master.tensor.detach().view(-1), plan.sent.get(place, ())
            parts = [one.returned(messages[one.number].unpacked) for one in found]
            update, start = torch.cat([part[0] for part in parts]).to(values.device), 0
            runs = [run for one in found for run in _runs(one.piece, plan.matrices[one.piece.matrix], tensor.cut)]
            for shape, same in groupby(runs, key=lambda run: run[1]):
                stop = start + sum(count for count, _ in same)
                self._rule.apply(values[start:stop], update[start:stop], shape, settings)
                start = stop
            if self._keeps is None:
                continue
            if self._keeps.feeds_back:
                result = torch.cat([part[1] for part in parts]).to(values.device)
                self._keeps.feed_back(master.tensor, result.view(master.shape), settings)
            for number, state in enumerate(self._states_of(plan, place, master, settings)):
                ranges = [part[self._results + number] for part in parts]
                foreach_copy_(list(state.view(-1).split([part.numel() for part in ranges])), ranges)


def _runs(piece: Piece, matrix: Matrix, cut: Cut | None) -> Sequence[tuple[int, tuple[int, int]]]:
    """The elements of a piece as runs: (elements, shape of the matrix that the rule sees)."""
    if cut is None:
        return [(piece.numel, matrix.shape)]
    return list(cut.shapes_of(piece.start - matrix.start, piece.stop - matrix.start))


def _initial(
    rule: StatefulRule,
    key: str,
    shapes: Sequence[tuple[int, ...]],
    edges: Sequence[int],
    settings: Settings,
    device: torch.device,
) -> torch.Tensor:
    """Elements of a state of matrices before the first step, one matrix behind the other, 1-D. `shapes`: of the state
    of each of the matrices, the first again behind the last.
    """
    (first, last), around = edges, sum(map(prod, shapes))
    start, parts = (first // around if around else 0) * around, []
    while start < last or not parts:
        for shape in shapes:
            begin, end = (min(max(edge - start, 0), prod(shape)) for edge in (first, last))
            if begin < end or not parts:
                parts.append(rule.initial_state(key, shape, begin, end, settings, device))
            start += prod(shape)
        if not around:
            break
    return torch.cat(parts)


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _write(pieces: Sequence[torch.Tensor], update: torch.Tensor) -> None:
    foreach_copy_(pieces, update.reshape(-1).split([piece.numel() for piece in pieces]))
