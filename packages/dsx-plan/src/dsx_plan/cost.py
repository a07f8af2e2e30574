"""Gives every entry of a trace a time on its lane, on a given machine.

The model, with the constants of `machine.Constants`:

* an operator takes the time of its arithmetic and of its bytes, plus a constant. On a CPU a matrix product takes the
  longer of the two, because caches hide one behind the other. On a device it takes their sum: a tile's arithmetic waits
  for its first bytes, and its results are written after it. So narrow matrices are slower than their arithmetic says
  (decision 0050 has the errors with the sum and with the longer of the two);
* fused attention reaches a share of the peak of its own, of the half of the arithmetic that a causal mask leaves;
* a message between ranks takes the longer of its bytes inside the host and between hosts over their rates, plus a
  constant times log2 of the ranks. The links of a host and those between hosts work at the same time; messages that
  need the same link share it in the order in which they are issued;
* computation is slower, by a share, while messages flow beside it: their kernels take some of the device;
* on a CPU a message keeps the core of its rank busy: the same cores copy and add up what is sent, so it takes the lane
  that issues it as long, and nothing of it is hidden behind computation;
* a copy between device and host, or host and disk, takes its bytes over that link's rate;
* what a lane waits for holds it up; the rest runs beside each other;
* the step of a job is that of its slowest rank: with normal deviations, the greatest of N is about sqrt(2 ln N)
  standard deviations above the mean.

It leaves out the host's own time where a device works, and faults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .machine import Machine
from .trace import (
    ATTENTION,
    CAUSAL,
    COMPUTE,
    COPY,
    MARK,
    MESSAGE,
    OPERATOR,
    PHASE,
    RATES,
    RECOMPUTED,
    WAIT_MARK,
    WAIT_MESSAGE,
    Message,
    Trace,
)

__all__ = ["Span", "Timing", "message_seconds", "simulate", "stragglers"]


@dataclass(frozen=True)
class Span:
    """Something on the timeline, in seconds from the beginning of the step."""

    lane: str
    name: str
    start: float
    end: float


@dataclass
class Timing:
    """The length of a step and what it is made of, in seconds.

    Attributes:
        step: of the whole.
        products: matrix products on the computing lane.
        attention: fused attention there.
        operators: other operators there, bound by memory.
        overhead: the constant of every operator.
        optimizer: of all that the step itself computes, the update among it.
        communication: of all messages together, on their links.
        exposed_communication: for which the computation waits.
        copies: between tiers, on their links.
        exposed_copies: for which the computation waits.
        interference: by which messages beside it make computation longer; it is part of the operators' times.
        spans: the timeline.
        at: when each entry of the replayed trace ended on its lane, by its place, where it was last run.
    """

    step: float = 0.0
    products: float = 0.0
    attention: float = 0.0
    operators: float = 0.0
    overhead: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0
    exposed_communication: float = 0.0
    copies: float = 0.0
    exposed_copies: float = 0.0
    interference: float = 0.0
    spans: list[Span] = field(default_factory=list)
    at: list[float] = field(default_factory=list)


_CAUSES = ("communication", "copies")
_MOST_SPANS = 4000


def simulate(
    trace: Trace,
    segments: Sequence[tuple[int, int, int]],
    machine: Machine,
    *,
    ranks_per_host: int,
    waits_for_stages: bool = True,
) -> Timing:
    """Run a trace on a machine.

    Args:
        trace: of one rank.
        segments: (first, end, times): what is done several times in a row.
        machine: where.
        ranks_per_host: that share the host's memory and disks.
        waits_for_stages: False: what other ranks send to this one alone is there when it is needed. When it comes is
            then for the schedule of a pipeline to say.
    """
    return _Simulation(trace, machine, ranks_per_host, waits_for_stages).run(segments)


def stragglers(machine: Machine, world_size: int) -> float:
    """The share by which the slowest of the ranks is later than their mean."""
    return machine.constants.jitter * math.sqrt(2.0 * math.log(max(1, world_size)))


def message_seconds(message: Message, machine: Machine) -> float:
    """The seconds that a message takes if no other message shares its links."""
    if message.ranks == 1:
        return 0.0
    return max(_on_links(message, machine)) + machine.constants.message_seconds * max(1.0, math.log2(message.ranks))


def _on_links(message: Message, machine: Machine) -> tuple[float, float]:
    """Seconds for which a message keeps the links inside its host and those between hosts."""
    share = machine.constants.links
    return message.inside / (machine.link_bandwidth * share), message.outside / (machine.network_bandwidth * share)


def _flops_per_second(machine: Machine) -> list[float]:
    """Operations per second by the rate of an operator, the flags of attention included."""
    constants = machine.constants
    plain = [math.inf if name in ("plain", "host") else machine.rate(name) for name in RATES]
    found = [math.inf] * RECOMPUTED
    for number, (name, rate) in enumerate(zip(RATES, plain)):
        attention = rate if constants.attention == 0.0 or rate == math.inf else machine.peak(name) * constants.attention
        causal = attention if constants.attention == 0.0 else 2.0 * attention
        found[number], found[number + ATTENTION], found[number + ATTENTION + CAUSAL] = rate, attention, causal
    return found


class _Simulation:
    def __init__(self, trace: Trace, machine: Machine, ranks_per_host: int, waits_for_stages: bool) -> None:
        self._trace, self._machine, self._waits_for_stages = trace, machine, waits_for_stages
        memory = machine.memory_bandwidth * machine.constants.memory
        self._slower = machine.constants.interference if machine.streams else 0.0
        self._bytes_per_second = [memory] * RECOMPUTED
        self._bytes_per_second[RATES.index("host")] = machine.host_bandwidth / ranks_per_host
        self._flops_per_second = _flops_per_second(machine)
        self._copy_rates = (
            machine.host_link_bandwidth, machine.host_link_bandwidth,
            machine.disk_bandwidth / ranks_per_host, machine.disk_bandwidth / ranks_per_host,
        )  # fmt: skip
        self._clock = [0.0] * trace.lanes
        self._cause = [0] * trace.lanes
        self._links = [0.0, 0.0]  # when the links inside the host, and those between hosts, are free
        self._flowing = 0.0  # until when messages flow
        self._copying = [0.0] * len(self._copy_rates)
        self._arrived: dict[int, float] = {}
        self._marked: dict[int, tuple[float, int]] = {}
        self._timing = Timing(at=[0.0] * len(trace))
        self._phase, self._phase_start = "", 0.0

    def run(self, segments: Sequence[tuple[int, int, int]]) -> Timing:
        timing, clock = self._timing, self._clock
        by_kind = {
            OPERATOR: self._operator, MESSAGE: self._message, WAIT_MESSAGE: self._wait_message, MARK: self._mark,
            WAIT_MARK: self._wait_mark, COPY: self._copy, PHASE: self._begin,
        }  # fmt: skip
        lanes, kinds = self._trace.lane, self._trace.kind
        for start, end, times in segments:
            for _ in range(times):
                for place in range(start, end):
                    lane = lanes[place]
                    by_kind[kinds[place]](place, lane)
                    timing.at[place] = clock[lane]
        self._end_phase()
        timing.step = max([*clock, self._flowing])
        return timing

    # - entries

    def _operator(self, place: int, lane: int) -> None:
        trace, timing = self._trace, self._timing
        rate = trace.rate[place] % RECOMPUTED
        by_flops = trace.number[place] / self._flops_per_second[rate]
        by_bytes = trace.extra[place] / self._bytes_per_second[rate]
        overhead = self._machine.constants.operator_seconds
        took = by_flops + by_bytes if self._machine.streams else max(by_flops, by_bytes)
        if lane == COMPUTE and self._slower and self._flowing > self._clock[lane]:
            longer = self._slower * min(took, self._flowing - self._clock[lane])
            timing.interference += longer
            took += longer
        self._clock[lane] += took + overhead
        if lane == COMPUTE:
            timing.overhead += overhead
            if rate >= ATTENTION:
                timing.attention += took
            elif by_flops > 0.0:
                timing.products += took
            else:
                timing.operators += took
            if self._phase == "step":
                timing.optimizer += took + overhead

    def _message(self, place: int, lane: int) -> None:
        number = self._trace.number[place]
        message = self._trace.messages[number]
        begin = self._clock[lane]
        arrives = message.op == "recv" and not self._waits_for_stages
        took = 0.0 if arrives else message_seconds(message, self._machine)
        if not message.small:
            begin = self._take_links(message, begin, took)
        self._arrived[number] = begin + took
        self._timing.communication += took
        if not self._machine.streams:
            self._wait(lane, begin + took, 0)
        self._span("communication", message.op, begin, begin + took)

    def _take_links(self, message: Message, begin: float, took: float) -> float:
        """Keep the links that a message needs, from when all of them are free; returns when."""
        busy = _on_links(message, self._machine)
        begin = max([begin, *(free for free, seconds in zip(self._links, busy) if seconds > 0.0)])
        if took > 0.0:
            latency = took - max(busy)
            self._links = [
                begin + seconds + latency if seconds > 0.0 else free for free, seconds in zip(self._links, busy)
            ]
        self._flowing = max(self._flowing, begin + took)
        return begin

    def _wait_message(self, place: int, lane: int) -> None:
        self._wait(lane, self._arrived.get(self._trace.number[place], 0.0), 0)

    def _mark(self, place: int, lane: int) -> None:
        self._marked[self._trace.number[place]] = (self._clock[lane], self._cause[lane])

    def _wait_mark(self, place: int, lane: int) -> None:
        until, cause = self._marked.get(self._trace.number[place], (0.0, 0))
        self._wait(lane, until, cause)

    def _wait(self, lane: int, until: float, cause: int) -> None:
        idle = until - self._clock[lane]
        self._cause[lane] = cause
        if idle <= 0.0:
            return
        if lane == COMPUTE:
            if _CAUSES[cause] == "communication":
                self._timing.exposed_communication += idle
            else:
                self._timing.exposed_copies += idle
            self._span("waiting", f"for {_CAUSES[cause]}", self._clock[lane], until)
        self._clock[lane] = until

    def _copy(self, place: int, lane: int) -> None:
        direction, nbytes = self._trace.number[place], self._trace.extra[place]
        begin = max(self._clock[lane], self._copying[direction])
        took = nbytes / self._copy_rates[direction]
        self._clock[lane] = self._copying[direction] = begin + took
        self._cause[lane] = 1
        self._timing.copies += took
        if lane == COMPUTE:
            self._timing.exposed_copies += took
        self._span("copies", ("to host", "to device", "to disk", "from disk")[direction], begin, begin + took)

    def _begin(self, place: int, lane: int) -> None:
        self._end_phase()
        self._phase = self._trace.phases[self._trace.number[place]]

    def _end_phase(self) -> None:
        now = self._clock[COMPUTE]
        if self._phase and now > self._phase_start:
            self._span("compute", self._phase, self._phase_start, now)
        self._phase_start = now

    def _span(self, lane: str, name: str, start: float, end: float) -> None:
        if end > start and len(self._timing.spans) < _MOST_SPANS:
            self._timing.spans.append(Span(lane, name, start, end))
