"""The work of one rank in one step, as data: operators, messages, copies and waits, in the order of each lane.

A lane is what a device calls a stream: its entries happen one after the other. Lane 0 computes. What an entry takes is
not said here: `cost.simulate` gives every entry a time, for any machine.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

__all__ = [
    "ATTENTION", "CAUSAL", "COMPUTE", "COPIES", "COPY", "MARK", "MESSAGE", "OPERATOR", "PHASE", "RATES", "RECOMPUTED",
    "WAIT_MARK", "WAIT_MESSAGE", "Message", "Trace",
]  # fmt: skip

OPERATOR, MESSAGE, WAIT_MESSAGE, MARK, WAIT_MARK, COPY, PHASE = range(7)
COMPUTE = 0
"""The lane of the computation."""

RATES = ("plain", "float32", "bfloat16", "float16", "float64", "float8", "host", "float4")
"""Kinds of operators by what limits their speed besides bytes: matmuls by dtype; work of the host."""

ATTENTION = 16
"""Added to the rate of fused attention, whose kernels reach another share of the peak than matrix products."""
CAUSAL = 32
"""Added to that where a query sees no later key: kernels leave out half of the arithmetic that is counted."""
RECOMPUTED = 64
"""Added to the rate of what is computed a second time, in backward."""

COPIES = ("to host", "to device", "to disk", "from disk")


@dataclass(frozen=True)
class Message:
    """A message between ranks.

    Attributes:
        op: as in `dsx_comm.rehearsal.RehearsedMessage`.
        inside: bytes that this rank sends to ranks of its host.
        outside: bytes that it sends to ranks of other hosts.
        ranks: number of ranks that take part.
        hosts: number of hosts that they stand on.
        small: it is a few words, for which latency is all.
        peer: global rank of the other side of a send or receive.
        sends: this rank sends (of a send or receive).
    """

    op: str
    inside: float
    outside: float
    ranks: int
    hosts: int
    small: bool
    peer: int = -1
    sends: bool = True


@dataclass
class Trace:
    """The entries of one step. Column i of `lane`, `kind`, `number`, `extra` is entry i.

    `number` and `extra` are, by kind: OPERATOR flops and bytes (with the rate in `rate`), MESSAGE and WAIT_MESSAGE the
    message's index, MARK and WAIT_MARK the mark's, COPY the index in `COPIES` and bytes, PHASE the index in `phases`.
    """

    lane: array = field(default_factory=lambda: array("b"))
    kind: array = field(default_factory=lambda: array("b"))
    number: array = field(default_factory=lambda: array("q"))
    extra: array = field(default_factory=lambda: array("q"))
    rate: array = field(default_factory=lambda: array("b"))
    messages: list[Message] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    lanes: int = 1
    marks: int = 0

    def __len__(self) -> int:
        return len(self.kind)

    def add(self, lane: int, kind: int, number: int, extra: int = 0, rate: int = 0) -> None:
        """Append an entry."""
        self.lane.append(lane)
        self.kind.append(kind)
        self.number.append(number)
        self.extra.append(extra)
        self.rate.append(rate)

    def clear(self) -> None:
        """Forget the entries; numbers of lanes, marks and messages go on."""
        for column in (self.lane, self.kind, self.number, self.extra, self.rate):
            del column[:]

    def flops_of(self, start: int, end: int) -> tuple[int, int]:
        """Operations of the entries from `start` to before `end`: all, and those that are done a second time."""
        every = again = 0
        for place in range(start, end):
            if self.kind[place] == OPERATOR:
                every += self.number[place]
                again += self.number[place] if self.rate[place] >= RECOMPUTED else 0
        return every, again
