"""Epoch and position of a loader whose order others give: a stream, an iterable dataset, or a sampler of the caller.

The base class and the orders that the loader makes itself are in `tracks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import DataStateError
from .stream import StreamReader
from .tracks import BatchSize, EpochTrack, expect_position

__all__ = ["CallerSamplerTrack", "SharedStreamTrack", "StreamTrack", "UpdateStreamTrack"]


class SharedStreamTrack(EpochTrack):
    """The track of a `SharedStream`: the position is a count of samples of the stream."""

    def __init__(self, reader: StreamReader, seed: int) -> None:
        super().__init__()
        self._reader = reader
        reader.seed = seed
        self._stride = reader.share.micro_batch_size * reader.share.world_size
        self._used = 0

    def _restart(self) -> None:
        self._reader.epoch, self._reader.position, self._used = self.epoch, 0, 0
        self.empty_means_next = False

    def advance(self) -> None:
        self._used += self._stride
        self.size = BatchSize(self._stride)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._reader.seed, "epoch": self.epoch, "position": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        expect_position(state)
        self._reader.seed = int(state["seed"])
        self.set_epoch(int(state["epoch"]))
        self._reader.position = self._used = int(state["position"])
        self.empty_means_next = self._used > 0


class UpdateStreamTrack(SharedStreamTrack):
    """The track of a `SharedStream` in complete updates. Each micro-batch brings the position of the next sample."""

    def __init__(self, reader: StreamReader, seed: int) -> None:
        super().__init__(reader, seed)
        self._next = (0, 0)  # epoch and position

    def set_batch_end(self, epoch: int, position: int) -> None:
        """Note the epoch and position at which the micro-batch that is handed out now ends."""
        self._next = (epoch, position)

    def _restart(self) -> None:
        super()._restart()
        self._next = (self.epoch, 0)

    def advance(self) -> None:
        self.size = BatchSize(self._stride)

    def finish(self) -> None:
        """Note that the loop has ended. The next one continues where the last update ended."""
        self._go_to(*(self._next if self._next[0] > self.epoch else (self.epoch + 1, 0)))

    def _go_to(self, epoch: int, position: int) -> None:
        self.set_epoch(epoch)
        self._reader.position, self._next = position, (epoch, position)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._reader.seed, "epoch": self._next[0], "position": self._next[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        expect_position(state)
        self._reader.seed = int(state["seed"])
        self._go_to(int(state["epoch"]), int(state["position"]))
        self.empty_means_next = self._reader.position > 0


class StreamTrack(EpochTrack):
    """The track of an iterable dataset that divides itself among ranks: the position is a count of this rank's batches.

    The position is valid only for the same number of ranks and workers.
    """

    def __init__(self, dataset: Any, world_size: int, num_workers: int) -> None:
        super().__init__()
        self._dataset, self._place = dataset, {"world_size": world_size, "num_workers": num_workers}
        self._used = 0

    def _restart(self) -> None:
        self._used = self.to_skip = 0
        self.empty_means_next = False
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self.epoch)

    def advance(self) -> None:
        self._used += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "batches": self._used, **self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        used = int(state.get("batches", 0))
        saved = {name: state.get(name, here) for name, here in self._place.items()}
        if used and saved != self._place:
            raise DataStateError(
                f"loader state: got {used} batches of an iterable dataset read with {saved}, expected {self._place};"
                " such a dataset shares itself out, so its position holds for one number of ranks and workers. Wrap it"
                " in dsx_data.SharedStream, which resumes with any"
            )
        self.set_epoch(int(state.get("epoch", 0)))
        self._used = self.to_skip = used
        self.empty_means_next = used > 0


class CallerSamplerTrack(EpochTrack):
    """The track of a sampler of the caller.

    If the sampler has `state_dict` and `load_state_dict`, its own state is saved. Otherwise batches are counted, and a
    resumed loop skips their indices.
    """

    def __init__(self, sampler: Any, micro_batch_size: int, *, rank: int, world_size: int, seed: int) -> None:
        super().__init__()
        self._sampler, self._micro, self._rank, self._world_size = sampler, micro_batch_size, rank, world_size
        self._seed = seed
        self._stateful = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self._used = self._skip = self._first = 0

    def __iter__(self) -> Iterator[Any]:
        indices, self._first = iter(self._sampler), self._used * self._micro
        for _ in range(self._skip * self._micro):
            next(indices, None)
        yield from indices

    def key(self, index: int, count: int) -> tuple[int, ...]:
        """The position in this rank's order: a sampler of the caller may draw a sample more than once."""
        return self._seed, self.epoch, self._first + count, self._rank

    def __len__(self) -> int:
        return len(self._sampler)

    def _restart(self) -> None:
        self._used = self._skip = self._first = 0
        self.empty_means_next = False
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)

    def advance(self) -> None:
        self._used += 1

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self.epoch, "batches": self._used}
        if self._stateful:
            return {**state, "sampler": self._sampler.state_dict()}
        return {**state, "batch_size": self._micro, "world_size": self._world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        used = int(state.get("batches", 0))
        saved = (state.get("batch_size", self._micro), state.get("world_size", self._world_size))
        own_state = self._stateful and "sampler" in state
        if used and not own_state and saved != (self._micro, self._world_size):
            raise DataStateError(
                f"loader state: got {used} batches of {saved[0]} samples on {saved[1]} ranks, expected batches of"
                f" {self._micro} on {self._world_size} ranks; the order is that of your sampler: give it state_dict()"
                " and load_state_dict(), or leave data_sampler out"
            )
        self.set_epoch(int(state.get("epoch", 0)))
        self._used = used
        if own_state:
            self._sampler.load_state_dict(state["sampler"])
            return
        self._skip = used
        self.empty_means_next = used > 0
