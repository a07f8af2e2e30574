"""One entry of a schedule: what a stage does with one micro-batch.

An action prints as `2F0` (stage 2, forward, micro-batch 0) and parses back. The text form is that of torch's
pipelining, so that plans can be compared side by side.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from ..errors import ScheduleError


class Kind(str, Enum):
    """The kind of work that an action does. The value is its text form."""

    FORWARD = "F"  # compute the stage's output
    BACKWARD = "B"  # compute the gradients of the stage's input and of its parameters
    INPUT = "I"  # compute the gradient of the stage's input only (zero-bubble)
    WEIGHT = "W"  # compute the gradients of the stage's parameters, after INPUT
    SEND_F = "SEND_F"  # send the output to the next stage
    RECV_F = "RECV_F"  # receive the input from the previous stage
    SEND_B = "SEND_B"  # send the gradient of the input to the previous stage
    RECV_B = "RECV_B"  # receive the gradient of the output from the next stage

    @property
    def computes(self) -> bool:
        """False for sends and receives."""
        return self in _COMPUTES

    @property
    def sends(self) -> bool:
        """True for the two sends."""
        return self in (Kind.SEND_F, Kind.SEND_B)

    @property
    def receives(self) -> bool:
        """True for the two receives."""
        return self in (Kind.RECV_F, Kind.RECV_B)


_COMPUTES = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT))
_TEXT = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")


@dataclass(frozen=True)
class Action:
    """One stage doing one kind of work on one micro-batch. Stages and micro-batches are counted from 0."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as `text`.

        Raises:
            ScheduleError: the text is not an action.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            kinds = ", ".join(kind.value for kind in Kind)
            raise ScheduleError(
                f"action: got {text!r}, expected <stage><kind><micro-batch> like 2F0; kinds are {kinds}"
            )
        return Action(int(match[1]), Kind(match[2]), int(match[3]))

    def peer_stage(self) -> int:
        """The stage at the other end of a send or receive."""
        return self.stage + (1 if self.kind in (Kind.SEND_F, Kind.RECV_B) else -1)

    def counterpart(self) -> Action:
        """The receive that belongs to this send, or the send that belongs to this receive."""
        other = {
            Kind.SEND_F: Kind.RECV_F, Kind.RECV_F: Kind.SEND_F, Kind.SEND_B: Kind.RECV_B, Kind.RECV_B: Kind.SEND_B,
        }  # fmt: skip
        return Action(self.peer_stage(), other[self.kind], self.micro_batch)
