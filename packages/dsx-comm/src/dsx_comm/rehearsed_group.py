"""The process group of a rehearsal, whose other ranks do what this one does, and the observer that hears its messages.

`rehearsal` says what a rehearsal is, and begins one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .groups import REHEARSAL
from .python_group import PythonGroup

__all__ = ["RehearsalGroup", "RehearsalObserver", "RehearsedMessage"]

_VALUES = 1 << 20
"""Bytes: larger tensors are data, not words, where no observer says otherwise."""


@dataclass(frozen=True)
class RehearsedMessage:
    """One communication of this rank.

    Attributes:
        op: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
            "send", "recv" or "barrier".
        ranks: global ranks of the group, in its order.
        rank: this process' global rank.
        sent: bytes that this rank sends, by the formulas of `dsx_comm.count_traffic`.
        received: bytes that come to this rank.
        peer: global rank of the other side of a send or receive, of the root of a rooted operation; -1: none.
        element: bytes of an element of what it gives; 0 where it gives nothing.
        group: number of the process group, by which two groups of the same ranks are told apart.
    """

    op: str
    ranks: tuple[int, ...]
    rank: int
    sent: float
    received: float
    peer: int = -1
    element: int = 0
    group: int = 0


class RehearsalObserver:
    """Hears of every message of a rehearsal. This one does nothing; inherit what is of interest."""

    def issued(self, message: RehearsedMessage) -> Any:
        """A message begins. What is returned is given to `waited`."""
        return None

    def waited(self, token: Any) -> None:
        """The process waits for a message that was issued; not called a second time."""

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor matter: they are then what equal ranks would make of them."""
        return tensor.numel() * tensor.element_size() <= _VALUES

    def received(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Put into `tensor` what global rank `source` sends (default: zeros where values matter)."""
        if self.has_values(tensor):
            tensor.zero_()

    def sent(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """This rank sends `tensor` to a global rank."""


class RehearsedWork(dist.Work):
    """A message under way: for this process it ends where it is waited for. What is sent to one rank has left at once
    (`left`), since who keeps it until then asks and does not wait.
    """

    def __init__(self, observer: RehearsalObserver, token: Any, value: Any, left: bool = False) -> None:
        super().__init__()
        self._observer, self._token, self._value = observer, token, value
        self._waited, self._left = False, left

    def wait(self, timeout: Any = None) -> bool:
        """Tell the observer, once."""
        if not self._waited:
            self._waited = True
            self._observer.waited(self._token)
        return True

    def is_completed(self) -> bool:
        """Only what was waited for is known to be done, as where a device works and the host runs ahead."""
        self._waited = self._waited or self._left
        return self._waited

    def is_success(self) -> bool:
        """Nothing fails here."""
        return True

    def exception(self) -> Any:
        """None."""
        return None

    def result(self) -> Any:
        """The tensors."""
        return self._value

    def get_future(self) -> Any:
        """A completed future."""
        future: Any = torch.futures.Future()
        future.set_result(self._value)
        return future

    def synchronize(self) -> None:
        """Like `wait`."""
        self.wait()


def _nbytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _flat(tensors))


def _flat(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
        return
    for item in tensors:
        yield from _flat(item)


class RehearsalGroup(PythonGroup):
    """A process group whose other ranks do what this one does."""

    _numbers = itertools.count()

    def __init__(self, rank: int, size: int, ranks: Sequence[int], observer: RehearsalObserver) -> None:
        super().__init__(rank, size, REHEARSAL)
        self._ranks, self._number = tuple(ranks), next(self._numbers)
        self._observer = observer

    def set_timeout(self, timeout: Any) -> None:
        """Nothing here waits."""

    def shutdown(self) -> None:
        """Nothing is held."""

    def abort(self, reason: str = "") -> None:
        """Nothing is under way."""

    # - helpers

    def _issue(self, op: str, sent: float, received: float, value: Any, peer: int = -1) -> Any:
        at = self._ranks[self._rank]
        other = -1 if peer < 0 else self._ranks[peer]
        element = next((tensor.element_size() for tensor in _flat(value)), 0)
        token = self._observer.issued(
            RehearsedMessage(op, self._ranks, at, sent, received, other, element, self._number)
        )
        return RehearsedWork(self._observer, token, value, op == "send")

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._observer.has_values(target) and target.data_ptr() != source.data_ptr():
            target.copy_(source.view(target.shape) if source.numel() == target.numel() else source)

    def _reduce(self, target: torch.Tensor, source: torch.Tensor, op: Any) -> None:
        """All ranks have `source`: their sum is a multiple of it, their mean, least and greatest it itself."""
        if not self._observer.has_values(target):
            return
        self._copy(target, source)
        kind = getattr(op, "op", op)
        if kind == dist.ReduceOp.SUM and target.dtype != torch.bool:
            target.mul_(self._size)
        elif kind == dist.ReduceOp.PRODUCT:
            target.pow_(self._size)
        elif kind == dist.ReduceOp.BXOR and self._size % 2 == 0:
            target.zero_()

    # - reductions

    def allreduce(self, tensors: Any, opts: Any = None, **_: Any) -> Any:
        """Every rank's tensors are equal to this one's."""
        found = list(_flat(tensors))
        for tensor in found:
            self._reduce(tensor, tensor, getattr(opts, "reduceOp", opts))
        size = _nbytes(found)
        sent = 2 * size * (self._size - 1) / self._size
        return self._issue("all_reduce", sent, sent, found)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, **_: Any) -> Any:
        """Into the root's."""
        found = list(_flat(tensors))
        root = getattr(opts, "rootRank", 0)
        if root == self._rank:
            for tensor in found:
                self._reduce(tensor, tensor, getattr(opts, "reduceOp", None))
        size = _nbytes(found)
        at_root = root == self._rank
        return self._issue("reduce", 0 if at_root else size, size if at_root else 0, found, root)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """outputs[0] = the reduction of all ranks' inputs[0][rank]."""
        output, parts = (outputs, inputs) if isinstance(outputs, torch.Tensor) else (outputs[0], inputs[0])
        self._reduce(output, parts[self._rank], getattr(opts, "reduceOp", opts))
        sent = _nbytes(parts) - _nbytes(parts[self._rank])
        return self._issue("reduce_scatter", sent, _nbytes(output) * (self._size - 1), [output])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, **_: Any) -> Any:
        """output = this rank's part of the reduction of `input`."""
        count = output.numel()
        if self._observer.has_values(output):
            part = input.reshape(-1)[self._rank * count : (self._rank + 1) * count].clone()
            self._reduce(output, part.view(output.shape), getattr(opts, "reduceOp", opts))
        sent = _nbytes(output) * (self._size - 1)
        return self._issue("reduce_scatter", sent, sent, [output])

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """Several at once."""
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs)]
        return _Works(works, list(outputs))

    # - gathers

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """The tensors of all ranks are this rank's."""
        single = isinstance(inputs, torch.Tensor)
        outputs, source = (output_lists, inputs) if single else (output_lists[0], inputs[0])
        for output in outputs:
            self._copy(output, source)
        sent = _nbytes(source) * (self._size - 1)
        return self._issue("all_gather", sent, sent, list(outputs))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, **_: Any) -> Any:
        """The same into one tensor."""
        if self._observer.has_values(output):
            output.view(-1).copy_(input.reshape(-1).clone().repeat(self._size))
        sent = _nbytes(input) * (self._size - 1)
        return self._issue("all_gather", sent, sent, [output])

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """Several at once."""
        return _Works([self.allgather([o], [i], opts) for o, i in zip(output_lists, inputs)], output_lists)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """Several at once."""
        return _Works([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs)], list(outputs))

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """Gather to the root, which takes its own tensor for that of every rank."""
        (source,) = tuple(_flat(inputs))
        root = getattr(opts, "rootRank", 0)
        if root != self._rank:
            return self._issue("gather", _nbytes(source), 0, [], root)
        for output in output_lists[0]:
            self._copy(output, source)
        return self._issue("gather", 0, _nbytes(source) * (self._size - 1), list(output_lists[0]), root)

    # - from one to all, all to all

    def broadcast(self, tensors: Any, opts: Any = None, **_: Any) -> Any:
        """The root's values are this rank's."""
        found, root = list(_flat(tensors)), getattr(opts, "rootRank", 0)
        size = _nbytes(found)
        at_root = root == self._rank
        return self._issue("broadcast", size if at_root else 0, 0 if at_root else size, found, root)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None, **_: Any) -> Any:
        """Copy the root's own part on the root. Other ranks' outputs are not filled: their values are not known."""
        (output,) = tuple(_flat(outputs))
        root = getattr(opts, "rootRank", 0)
        if root == self._rank:
            self._copy(output, input_lists[0][self._rank])
            return self._issue("scatter", _nbytes(output) * (self._size - 1), 0, [output], root)
        return self._issue("scatter", 0, _nbytes(output), [output], root)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = (), input_split_sizes: Any = (),
        opts: Any = None, **_: Any,
    ) -> Any:  # fmt: skip
        """Fill the output with what this rank has for itself, as far as it goes, in place of every rank's part."""
        sends = _rows(input, input_split_sizes, self._size)
        return self.alltoall(_rows(output, output_split_sizes, self._size), sends, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """The same with one tensor per rank."""
        mine = inputs[self._rank]
        for output in outputs:
            if output.numel() == mine.numel():
                self._copy(output, mine)
            elif self._observer.has_values(output):
                output.zero_()
        sent = _nbytes(inputs) - _nbytes(mine)
        received = _nbytes(outputs) - _nbytes(outputs[self._rank])
        return self._issue("all_to_all", sent, received, list(outputs))

    def barrier(self, opts: Any = None, **_: Any) -> Any:
        """No rank is late."""
        return self._issue("barrier", 0, 0, [])

    # - point to point

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Send to the group's rank `dst`."""
        (tensor,) = tuple(_flat(tensors))
        self._observer.sent(tensor, self._ranks[dst], tag)
        return self._issue("send", _nbytes(tensor), 0, [tensor], dst)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Receive from the group's rank `src`: the observer fills the tensor."""
        (tensor,) = tuple(_flat(tensors))
        self._observer.received(tensor, self._ranks[src], tag)
        return self._issue("recv", 0, _nbytes(tensor), [tensor], src)

    # - torch's other names

    _allgather_base: Any = all_gather_single
    _reduce_scatter_base: Any = reduce_scatter_single
    alltoall_base: Any = all_to_all_single
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced
    all_gather_into_tensor_coalesced: Any = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced


def _rows(tensor: torch.Tensor, sizes: Any, size: int) -> list[torch.Tensor]:
    return list(tensor.split(list(sizes)) if sizes else tensor.chunk(size))


class _Works(dist.Work):
    """Several messages as one."""

    def __init__(self, works: Sequence[Any], value: Any) -> None:
        super().__init__()
        self._works, self._value = list(works), value

    def wait(self, timeout: Any = None) -> bool:
        """Wait for all of them."""
        return all([work.wait() for work in self._works])

    def is_completed(self) -> bool:
        """Are all of them done?"""
        return all(work.is_completed() for work in self._works)

    def result(self) -> Any:
        """The tensors."""
        return self._value

    def exception(self) -> Any:
        """None."""
        return None
