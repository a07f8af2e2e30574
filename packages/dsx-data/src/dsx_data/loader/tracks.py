"""Epoch and position of a loader that makes the order of its samples itself; orders of others are in `given_tracks`.

A track counts batches when they leave the loader, not when the order is read: worker processes read the order ahead of
the training. So `state_dict()` has the position of the first batch that was not handed out.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from dsx_core import with_code

from ..batching.plan import TokenBudget
from ..curriculum import CurriculumSampler
from ..errors import DataStateError
from .order import KEYED_ABOVE, ShardedSampler, rank_share

__all__ = [
    "BatchSize", "CurriculumTrack", "EpochTrack", "PlannedTrack", "PositionTrack", "Track", "expect_position",
    "load_order", "position_state", "warn_of_other_length",
]  # fmt: skip

logger = logging.getLogger("dsx_data")


@dataclass(frozen=True)
class BatchSize:
    """Size of a micro-batch.

    Attributes:
        samples: samples of all ranks together, each counted once; 0 if that is not known.
        own_samples, own_tokens: samples and tokens of this rank's batch; 0 if the loader has no token budget.
        sum_samples, sum_tokens: sums over the batches of all ranks. A batch that is repeated so that every rank has one
            counts twice.
    """

    samples: int
    own_samples: int = 0
    own_tokens: int = 0
    sum_samples: int = 0
    sum_tokens: int = 0


class Track(Protocol):
    """The interface of a loader to the order it reads.

    Attributes:
        epoch: epoch of the running loop, or of the next one.
        to_skip: batches that the loader must read and throw away at the start of the next loop.
        size: size of the micro-batch handed out last.
        empty_means_next: if the next loop yields no batch, its epoch was used up when the state was saved, and the
            loader must continue with the next epoch.
    """

    epoch: int
    to_skip: int
    size: BatchSize
    empty_means_next: bool

    def set_epoch(self, epoch: int) -> None: ...

    def begin(self) -> None: ...

    def advance(self) -> None: ...

    def finish(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def key(self, index: int, count: int) -> tuple[int, ...]:
        """Numbers that identify one draw of a sample, the same for any number of ranks where the track can.

        Args:
            index: number of the sample.
            count: samples that this rank drew before it in the loop that runs.
        """
        ...


class EpochTrack:
    """The common part of most tracks: a loop is an epoch, and a loop that was left early ends its epoch."""

    to_skip = 0
    size = BatchSize(0)
    empty_means_next = False

    def __init__(self) -> None:
        self.epoch = 0
        self._under_way = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._under_way = False
        self._restart()

    def begin(self) -> None:
        if self._under_way:
            self.set_epoch(self.epoch + 1)
        self._under_way = True

    def finish(self) -> None:
        self.set_epoch(self.epoch + 1)

    def _restart(self) -> None:
        """Put the order at the start of `self.epoch`."""

    @property
    def seed(self) -> int:
        """Seed of the order."""
        return 0

    def key(self, index: int, count: int) -> tuple[int, ...]:
        """The seed, the epoch and the sample's number: an epoch has each sample once."""
        return self.seed, self.epoch, index


class PositionTrack(EpochTrack):
    """The track of a `ShardedSampler`: the position is a count of global samples."""

    def __init__(self, sampler: ShardedSampler, micro_batch_size: int) -> None:
        super().__init__()
        self._sampler = sampler
        self._stride = micro_batch_size * sampler.world_size
        self._used = 0

    @property
    def seed(self) -> int:
        return self._sampler.seed

    def _restart(self) -> None:
        self._sampler.set_epoch(self.epoch)
        self._used = 0

    def advance(self) -> None:
        self.size = BatchSize(min(self._stride, self._sampler.length - self._used))
        self._used += self.size.samples

    def state_dict(self) -> dict[str, Any]:
        return position_state(self._sampler, self.epoch, self._used)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_order(self._sampler, state)
        position = int(state["position"])
        if position >= self._sampler.length:
            self.set_epoch(int(state["epoch"]) + 1)
            return
        self.set_epoch(int(state["epoch"]))
        self._sampler.position = self._used = position


class PlannedTrack(EpochTrack):
    """The track of batches that a token budget planned: the position is a count of micro-batches of all ranks.

    It is also the batch sampler: iterating over it yields this rank's batches as lists of sample numbers.
    """

    def __init__(self, budget: TokenBudget, *, rank: int, world_size: int, seed: int, drop_last: bool) -> None:
        super().__init__()
        self._budget, self._rank, self._world_size = budget, rank, world_size
        self._seed, self._drop_last = seed, drop_last
        self._position = self._first = 0
        self._plan_of: tuple[int, int] | None = None

    @property
    def seed(self) -> int:
        return self._seed

    def _plan(self) -> Any:
        if self._plan_of != (self._seed, self.epoch):
            self._made = self._budget.plan(seed=self._seed, epoch=self.epoch)
            self._plan_of = (self._seed, self.epoch)
        return self._made

    def __len__(self) -> int:
        remaining = len(self._plan()) - self._position
        return remaining // self._world_size if self._drop_last else -(-remaining // self._world_size)

    def __iter__(self) -> Iterator[list[int]]:
        plan, self._first = self._plan(), self._position
        numbers = np.arange(self._position, len(plan))
        for number in rank_share(
            numbers, rank=self._rank, world_size=self._world_size, drop_last=self._drop_last
        ).tolist():
            yield plan[number].tolist()

    def _group(self) -> list[np.ndarray]:
        """The batches of all ranks in the next round, as `rank_share` divides them, but for one round only."""
        plan, count = self._plan(), len(self._plan()) - self._first
        places = range(self._position - self._first, self._position - self._first + self._world_size)
        # In the last round, a rank without a batch of its own repeats one from the start of the loop.
        return [plan[self._first + (place if place < count else (place - count) % count)] for place in places]

    def _restart(self) -> None:
        self._position = self._first = 0

    def advance(self) -> None:
        group, left = self._group(), len(self._plan()) - self._position
        tokens = [int(self._budget.lengths[batch].sum()) for batch in group]
        self.size = BatchSize(
            sum(map(len, group[:left])),
            own_samples=len(group[self._rank]), own_tokens=tokens[self._rank],
            sum_samples=sum(map(len, group)), sum_tokens=sum(tokens),
        )  # fmt: skip
        self._position += min(left, self._world_size)

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self._seed, "epoch": self.epoch, "batches": self._position, "length": self._budget.size,
            "plan": self._plan().fingerprint(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "batches" not in state:
            raise DataStateError("loader state: got a position in samples, expected one in batches of a token budget")
        self._seed = int(state["seed"])
        self.set_epoch(int(state["epoch"]))
        plan = self._plan()
        if plan.fingerprint() != state["plan"]:
            raise DataStateError(
                "loader state: the token budget, the lengths or the order of the batches are not those of the saved"
                " run, so its position means nothing here; use the settings of that run"
            )
        if int(state["batches"]) >= len(plan):
            self.set_epoch(self.epoch + 1)
        else:
            self._position = int(state["batches"])


class CurriculumTrack(EpochTrack):
    """The track of a `CurriculumSampler`: its draws are one long sequence of samples, cut into micro-batches.

    It is also the batch sampler. Before each draw it saves the sampler's state, so that the state at the batch that was
    handed out last is known although the draws are ahead of it.
    """

    def __init__(self, sampler: CurriculumSampler, *, rank: int, world_size: int, micro_batch_size: int) -> None:
        super().__init__()
        self.sampler, self._rank, self._world_size = sampler, rank, world_size
        self._stride = micro_batch_size * world_size
        self._draws: deque[tuple[int, dict[str, Any], dict[str, int]]] = deque()
        """Draws not used up: number of the first sample, the sampler's state before the draw, the difficulties."""
        self._used = self._start = 0  # samples of the sequence that were handed out: until now, until the loop's start
        self.difficulties = sampler.current_difficulties

    def __len__(self) -> int:
        return (self.sampler.total - self._used) // self._stride

    def __iter__(self) -> Iterator[list[int]]:
        if self._draws:
            self.sampler.load_state_dict(self._state_of_next())
            self._draws.clear()
        position, start, pending = self._used, self.sampler.drawn, np.zeros(0, np.int64)
        self._start = position
        while position + self._stride <= self.sampler.total:
            while start + len(pending) < position + self._stride:
                before, first = self.sampler.state_dict(), self.sampler.drawn
                draw = self.sampler.draw()
                self._draws.append((first, before, draw.difficulties))
                pending = np.concatenate([pending, draw.samples])
            offset = position - start
            group = pending[offset : offset + self._stride]
            pending, start = pending[offset + self._stride :], position + self._stride
            position += self._stride
            yield group[self._rank :: self._world_size].tolist()

    def key(self, index: int, count: int) -> tuple[int, ...]:
        """The seed and the position in the sequence of draws: a curriculum may draw a sample more than once."""
        return self.sampler.seed, self._start + self._rank + count * self._world_size

    def _drop_used_up(self) -> None:
        """Remove the draws of which every sample was handed out, but keep the latest one."""
        while len(self._draws) > 1 and self._draws[1][0] <= self._used:
            self._draws.popleft()

    def _state_of_next(self) -> dict[str, Any]:
        """The sampler's state before the draw that holds the next sample to hand out."""
        self._drop_used_up()
        if not self._draws or self._used >= self._draws[0][0] + self.sampler.batch_size:
            return self.sampler.state_dict()  # every sample that was drawn was handed out
        return self._draws[0][1]

    def begin(self) -> None:
        """Note that a loop begins. A curriculum has no epochs: each loop continues where the previous one was left."""
        self._under_way = True

    def finish(self) -> None:
        self._under_way = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def advance(self) -> None:
        self._drop_used_up()
        self.difficulties = self._draws[0][2]
        self._used += self._stride
        self.size = BatchSize(self._stride)
        self.epoch = self._used // self.sampler.size

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": self._used,
            "sampler": self._state_of_next(),
            "current_difficulties": dict(self.difficulties),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "samples" not in state or "sampler" not in state:
            raise DataStateError("loader state: got one of a loader without curriculum, expected one of a curriculum")
        self.sampler.load_state_dict(state["sampler"])
        self._draws.clear()
        self._used = int(state["samples"])
        self.epoch = self._used // self.sampler.size
        self.difficulties = dict(state["current_difficulties"])


def expect_position(state: dict[str, Any]) -> None:
    """Raise `DataStateError` unless `state` counts samples of an epoch's order."""
    if "position" not in state:
        raise DataStateError(
            f"loader state: got one with {sorted(state)}, expected a position in samples; it was saved by a loader with"
            " another kind of order (a curriculum, a token budget, an iterable dataset or a sampler of your own)"
        )


def position_state(sampler: Any, epoch: int, position: int) -> dict[str, Any]:
    """The state of an order of the loader's own, which says, too, if the order is a keyed permutation."""
    state = {"seed": sampler.seed, "epoch": epoch, "position": position, "length": sampler.length}
    return {**state, "order": "keyed"} if sampler.keyed else state


def load_order(sampler: Any, state: dict[str, Any]) -> None:
    """Make `sampler` continue the order of `state`, also one of many samples that began with an order in memory.

    Raises:
        DataStateError: the state belongs to another kind of order.
    """
    expect_position(state)
    if state.get("order", "keyed") != "keyed":
        raise DataStateError(
            f"loader state: got the order {state['order']!r}, expected 'keyed' or none: a newer dsx_data saved it"
        )
    began_in_memory = "order" not in state and int(state.get("length", sampler.length)) > KEYED_ABOVE
    sampler.seed = int(state["seed"])
    sampler.keyed = sampler.length > KEYED_ABOVE and not began_in_memory
    warn_of_other_length(state, sampler.length)


def warn_of_other_length(state: dict[str, Any], length: int) -> None:
    """Log a warning if the dataset has another length than the one that the state was saved with."""
    saved = int(state.get("length", length))
    if saved != length:
        text = (
            "the data position was saved with a dataset of %d samples, this one has %d: the order of the samples is"
            " another one, so some are used twice in this epoch and some not at all"
        )
        logger.warning(with_code(text, "DSX752"), saved, length)
