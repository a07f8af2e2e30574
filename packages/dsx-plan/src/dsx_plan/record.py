"""Records of a replayed step: the begin of its parts in the trace, and the messages sent until then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .trace import Trace

__all__ = ["Record", "StageReplay", "Steps", "counted"]


@dataclass(frozen=True)
class StageReplay:
    """The replayed step of one rank of a pipeline.

    Attributes:
        place: of this rank in the pipeline.
        ranks: global ranks of the pipeline.
        schedule: of all micro-batches of a step (`dsx_pipe.Schedule`).
        replayed: of those that were replayed.
        actions: (action, first entry, last entry) in the trace, in their order.
        kept: by stage, the most micro-batches whose activations it kept at one time.
        copied: elements of shared weights that count on another rank.
        sent, given: letters to and from each global rank, in all steps.
    """

    place: int
    ranks: tuple[int, ...]
    schedule: Any
    replayed: Any
    actions: Sequence[tuple[Any, int, int]]
    kept: Mapping[int, int]
    copied: int
    sent: Mapping[int, Sequence[Any]]
    given: Mapping[int, Sequence[Any]]


class Record:
    """One step.

    Args:
        trace: that it is recorded in.
        traffic: what counts the bytes that are sent (`dsx_comm.count_traffic`); None: nothing is counted.

    Attributes:
        times: how often each part is done: the parts that are alike are replayed once.
        resident: bytes of model state by class and tier, when all gradients are there.
        stage: of a pipeline.
    """

    def __init__(self, trace: Trace, traffic: Any) -> None:
        self._trace, self._traffic = trace, traffic
        self._places, self._counts = [len(trace)], [counted(traffic)]
        self.times: list[int] = []
        self.resident: dict[str, dict[str, int]] = {}
        self.stage: StageReplay | None = None

    def cut(self, place: int | None = None, count: dict[str, tuple[int, float]] | None = None, times: int = 1) -> None:
        """A part ends here, or at a place of the trace at which `count` had been sent."""
        self._places.append(len(self._trace) if place is None else place)
        self._counts.append(counted(self._traffic) if count is None else count)
        self.times.append(times)

    def segments(self) -> list[tuple[int, int, int]]:
        """(first, end, times) of the trace."""
        return list(zip(self._places, self._places[1:], self.times))

    def messages(self) -> dict[str, tuple[int, float]]:
        """{operation: (calls, bytes sent)} of the whole step."""
        found: dict[str, tuple[int, float]] = {}
        for before, after, times in zip(self._counts, self._counts[1:], self.times):
            for op, (calls, sent) in after.items():
                old, known = before.get(op, (0, 0)), found.get(op, (0, 0))
                found[op] = (known[0] + times * (calls - old[0]), known[1] + times * (sent - old[1]))
        return found


class Steps(Protocol):
    """Trains a replayed rank."""

    def run(self, traffic: Any) -> Record:
        """Train for one update.

        Args:
            traffic: see `Record`.
        """
        ...


def counted(traffic: Any) -> dict[str, tuple[int, float]]:
    """{operation: (calls, bytes sent)} so far."""
    return {} if traffic is None else dict(traffic.by_op())
