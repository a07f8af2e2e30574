"""Small messages between the ranks, in host memory, by which an `AgreedOrder` agrees: tuples of integers ("words")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import dsx_comm
import torch

__all__ = ["MANY", "Answer", "AskingChannel", "Asks", "ControlChannel", "ManyRanks", "OneRank", "channel_of"]

MANY = 8
"""From this number of ranks on, three messages sent in turn by a thread are faster than an all-gather of seven
(`packages/dsx-comm/bench/small_gather.py`).
"""


class Answer(Protocol):
    """The answers of all ranks to a yes-or-no question."""

    def get(self) -> bool:
        """Wait for all ranks. Returns whether each of them said yes. Call it once."""
        ...


class Asks(Protocol):
    """Asks all ranks yes-or-no questions."""

    def ask(self, yes: bool) -> Answer:
        """Start to ask whether all ranks say yes. Every rank calls it, in the same order.

        Args:
            yes: this rank's answer.
        """
        ...


class AskingChannel(Asks, Protocol):
    """The `Channel` of an order that asks questions too."""

    rank: int

    def exchange(self, words: tuple[int, ...]) -> list[tuple[int, ...]]:
        """See `Channel.exchange`."""
        ...

    def post(self, words: tuple[int, ...]) -> Callable[[], list[tuple[int, ...]]]:
        """See `Channel.post`."""
        ...


class _Asked:
    """The answer while the number of ranks that say no is in flight."""

    def __init__(self, noes: torch.Tensor, handle: Any) -> None:
        self._noes, self._handle = noes, handle

    def get(self) -> bool:
        """See `Answer.get`."""
        if self._handle is not None:
            self._handle.wait()
        return self._noes.item() == 0.0


class _Said:
    """The answer of one rank alone."""

    def __init__(self, yes: bool) -> None:
        self._yes = yes

    def get(self) -> bool:
        """See `Answer.get`."""
        return self._yes


class ControlChannel:
    """The `Channel` over a group that can send host tensors. It has the same ranks as the group of the parameters."""

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        self.rank, self._group, self._world_size = rank, group, world_size
        self._gathers: dict[int, dsx_comm.PreparedCollective] = {}
        """A prepared all-gather for each number of words."""

    def exchange(self, words: tuple[int, ...]) -> list[tuple[int, ...]]:
        """See `Channel.exchange`: one all-gather."""
        return self.post(words)()

    def post(self, words: tuple[int, ...]) -> Callable[[], list[tuple[int, ...]]]:
        """See `Channel.post`: the all-gather runs in the background."""
        mine = torch.tensor(words, dtype=torch.int64, device="cpu")
        rows = torch.empty(self._world_size * len(words), dtype=torch.int64, device="cpu")
        handle = self._start(rows, mine)

        def read() -> list[tuple[int, ...]]:
            handle.wait()
            table = rows.view(self._world_size, -1)
            if self._world_size >= MANY and bool((table == mine).all()):
                return [words] * self._world_size
            return [tuple(row) for row in table.tolist()]

        return read

    def _start(self, rows: torch.Tensor, mine: torch.Tensor) -> Any:
        gather = self._gathers.get(mine.numel())
        if gather is None:
            gather = dsx_comm.prepare_all_gather(mine.numel(), mine.dtype, mine.device, self._group)
            self._gathers[mine.numel()] = gather
        return gather.start(rows, mine)

    def ask(self, yes: bool) -> Answer:
        """See `Asks.ask`: one all-reduce of a number, which is a ring of 2 (N - 1) messages where gloo carries it."""
        noes = torch.tensor([0.0 if yes else 1.0], device="cpu")
        return _Asked(noes, dsx_comm.all_reduce(noes, group=self._group, async_op=True))


class _AskedInRounds:
    """The answer while the words of all ranks, 0 for yes, are in flight."""

    def __init__(self, said: torch.Tensor, handle: Any) -> None:
        self._said, self._handle = said, handle

    def get(self) -> bool:
        """See `Answer.get`."""
        self._handle.wait()
        return not self._said.any().item()


class ManyRanks(ControlChannel):
    """The `Channel` of many ranks over gloo: each rank sends ceil(log2 N) messages instead of N - 1. In most rounds all
    ranks say the same; that is seen at once, without a look at each rank's words.
    """

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        super().__init__(group, rank, world_size)
        self._lane = dsx_comm.StepLane()

    def _start(self, rows: torch.Tensor, mine: torch.Tensor) -> Any:
        return dsx_comm.all_gather_in_rounds(rows, mine, self._group, async_op=True, lane=self._lane)

    def ask(self, yes: bool) -> Answer:
        """See `Asks.ask`: a word of each rank, by the same rounds."""
        said = torch.empty(self._world_size, dtype=torch.int64, device="cpu")
        return _AskedInRounds(said, self._start(said, torch.tensor([0 if yes else 1], device="cpu")))


def channel_of(group: Any, rank: int, world_size: int) -> ControlChannel:
    """The channel over a group of several ranks, chosen by their number and by what carries its host tensors."""
    many = world_size >= MANY and dsx_comm.can_gather_in_rounds(group)
    return (ManyRanks if many else ControlChannel)(group, rank, world_size)


class OneRank:
    """The `Channel` of one rank alone. Its order freezes and gathers ahead by the same rules as for several ranks."""

    rank = 0

    def exchange(self, words: tuple[int, ...]) -> list[tuple[int, ...]]:
        """See `Channel.exchange`: there is no other rank."""
        return self.post(words)()

    def post(self, words: tuple[int, ...]) -> Callable[[], list[tuple[int, ...]]]:
        """See `Channel.post`."""
        return lambda: [words]

    def ask(self, yes: bool) -> Answer:
        """See `Asks.ask`."""
        return _Said(yes)
