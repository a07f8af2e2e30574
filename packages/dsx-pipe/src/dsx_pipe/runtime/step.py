"""One step of one rank: its actions in order, with the messages that it receives and sends.

A stage that fails does not stop the schedule. Its rank goes through its remaining actions without computing, receives
the messages of the others, and sends the failure instead of every value; so does each rank that receives the failure.
So every send still has its receive, no rank hangs, the queues are empty, and at the end all ranks know of the failure.
Only a rank whose process has ended does not take part.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..errors import PipelineError
from ..schedule import Action, Kind, Schedule, Span
from .clock import Clock, clock_for
from .data import DataError, MicroBatches
from .failure import Failure, layer_of
from .messages import DATA, FAILURE, LOST, Key, Mailbox, Parcel, PeerLost, Spec
from .stage import NonFiniteGradient, NonFiniteLoss, Stage, as_input
from .structure import describe

_NOTHING = object()


@dataclass(frozen=True)
class Mode:
    """How a step runs: with backward or not, with a loss or not, whether the last stage keeps its outputs."""

    train: bool
    loss: bool = True
    keep_outputs: bool = False


class Step:
    """Carries out one rank's part of a schedule once.

    Args:
        agreed: output of each of this rank's stages as first sent, with which later ones are compared; None: shapes
            may change.
        clock: times the computations; None: the host's or the device's.

    Attributes:
        start: when the step began.
        failures: what failed on this rank.
        lost: ranks whose process has ended.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: dict[int, Stage],
        mailbox: Mailbox,
        data: MicroBatches,
        mode: Mode,
        agreed: dict[tuple[int, int], Spec] | None,
        clock: Clock | None = None,
    ) -> None:
        self.schedule, self.rank, self.stages, self.mailbox = schedule, rank, stages, mailbox
        self.data, self.mode, self.agreed = data, mode, agreed
        self.start = time.perf_counter()
        self._clock = clock_for(mailbox.groups.device) if clock is None else clock
        self._marks: list[tuple[Action, Any, Any]] = []
        self.failures: list[Failure] = []
        self.lost: set[int] = set()
        self.poison: tuple[int, bytes] | None = None
        self._values: dict[Key, Any] = {}  # what has arrived or was made here, by who needs it
        self._last = {a.stage: a for a in schedule.actions[rank] if a.kind in (Kind.BACKWARD, Kind.WEIGHT)}

    def run(self) -> None:
        """Carry out all actions. Failures are collected, not raised."""
        for stage in self.stages.values():
            stage.begin()
        for computes, part in groupby(self.schedule.actions[self.rank], lambda action: action.kind.computes):
            for action in part:
                if computes:
                    self._compute(action)
                elif action.kind.sends:
                    self._send(action)
                else:
                    self._values[self._key_at(action)] = self._receive(action.peer_stage(), self._key_at(action))
            if not computes:
                self._flush()
        try:
            self.mailbox.wait_sent(self.lost)
        except PeerLost as error:
            self._peer_lost(error)

    @property
    def spans(self) -> list[Span]:
        """When each computation began and ended; waits for the device."""
        seconds = self._clock.seconds
        return [Span(self.rank, action, seconds(start), seconds(end)) for action, start, end in self._marks]

    # - computing

    def _compute(self, action: Action) -> None:
        arrived = _NOTHING if action.kind is Kind.WEIGHT else self._input(action)
        result = _NOTHING
        if self.poison is None:
            result = self._guarded(action, arrived)
        if action.kind is Kind.WEIGHT:
            return
        key = self._key_after(action)
        if key is None:
            return
        far = self.schedule.stage_ranks[key.stage] != self.rank
        if far and self.schedule.communicates:
            self._values[key] = result  # until its send
        elif far:
            self._post(key, result, action)
        elif result is not _NOTHING:
            self._values[key] = result if key.backward else as_input(result)

    def _guarded(self, action: Action, arrived: Any) -> Any:
        """Run the computation; an exception becomes a failure of this stage."""
        doing = {Kind.FORWARD: "forward", Kind.WEIGHT: "weight backward"}.get(action.kind, "backward")
        stage, labels = self.stages[action.stage], None
        try:
            if action.kind is Kind.FORWARD:
                arrived, labels = self._data(action, arrived)
            start = self._clock.mark(action)
            result = self._run(action, arrived, labels)
            self._marks.append((action, start, self._clock.mark(action)))
            return result
        except PeerLost as error:
            self._peer_lost(error)
        except NonFiniteLoss as error:
            self._fail(Failure(action.stage, self.rank, action.micro_batch, None, doing, str(error), nonfinite=True))
        except NonFiniteGradient as error:
            self._fail(Failure(action.stage, self.rank, error.micro_batch, error.layer, doing, str(error)))
        except Exception as error:  # noqa: BLE001  (whatever it is, every rank has to hear of it)
            layer = layer_of(stage.module, error.__traceback__) if action.kind is Kind.FORWARD else None
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, PipelineError):
                reason, doing = str(error), "loading data" if isinstance(error, DataError) else doing
            elif action.kind is Kind.FORWARD:
                reason += self._context(stage, arrived, labels)
            self._fail(Failure(action.stage, self.rank, action.micro_batch, layer, doing, reason))
        return _NOTHING

    @staticmethod
    def _context(stage: Stage, arrived: Any, labels: Any) -> str:
        """What a failed forward was given."""
        text = f"the stage's input is {describe(arrived)}"
        return f" ({text}, its labels are {describe(labels)})" if stage.is_last else f" ({text})"

    def _run(self, action: Action, arrived: Any, labels: Any) -> Any:
        stage, m = self.stages[action.stage], action.micro_batch
        if action.kind is Kind.FORWARD:
            return stage.forward(
                m, arrived, labels, self.schedule.micro_batches,
                train=self.mode.train, loss=self.mode.loss, keep_output=self.mode.keep_outputs,
            )  # fmt: skip
        last = self._last.get(action.stage) == action or (
            action.kind is Kind.INPUT and self._last[action.stage].micro_batch == m
        )
        if action.kind is Kind.WEIGHT:
            return stage.weight(m, last=last)
        return stage.backward(m, [] if stage.is_last else arrived, whole=action.kind is Kind.BACKWARD, last=last)

    def _data(self, action: Action, arrived: Any) -> tuple[Any, Any]:
        first, last = action.stage == 0, self.stages[action.stage].is_last
        needs_labels = last and self.mode.loss and self.stages[action.stage].loss_fn is not None
        inputs, labels = self.data.get(action.micro_batch) if first or needs_labels else (None, None)
        return (inputs if first else arrived), labels

    # - messages

    def _key_at(self, action: Action) -> Key:
        """The key under which this action's message arrives, or (for a send) was made."""
        stage = action.peer_stage() if action.kind.sends else action.stage
        return Key(stage, action.kind in (Kind.SEND_B, Kind.RECV_B), action.micro_batch)

    def _key_after(self, action: Action) -> Key | None:
        """Who needs the result of a computation; None if no stage does."""
        backward = action.kind is not Kind.FORWARD
        stage = action.stage - 1 if backward else action.stage + 1
        return Key(stage, backward, action.micro_batch) if 0 <= stage < self.schedule.stages else None

    def _input(self, action: Action) -> Any:
        backward = action.kind is not Kind.FORWARD
        source = action.stage + 1 if backward else action.stage - 1
        if not 0 <= source < self.schedule.stages:
            return None
        key = Key(action.stage, backward, action.micro_batch)
        if self.schedule.stage_ranks[source] == self.rank or self.schedule.communicates:
            return self._values.pop(key, _NOTHING)
        return self._receive(source, key)

    def _receive(self, source_stage: int, key: Key) -> Any:
        source = self.schedule.stage_ranks[source_stage]
        if source in self.lost:
            return _NOTHING
        try:
            message = self.mailbox.receive(source, key)
        except PeerLost as error:
            self._peer_lost(error)
            return _NOTHING
        if message.status == DATA:
            return message.value
        if self.poison is None or message.status == LOST:
            self.poison = (message.status, message.text)
        return _NOTHING

    def _send(self, action: Action) -> None:
        key = self._key_at(action)
        self._post(key, self._values.pop(key, _NOTHING), action)

    def _post(self, key: Key, value: Any, action: Action) -> None:
        destination = self.schedule.stage_ranks[key.stage]
        if destination in self.lost:
            return
        try:
            if value is not _NOTHING:
                self._send_value(destination, key, value, action)
            if self.poison is not None:
                self.mailbox.send_failure(destination, key, *self.poison)
        except PeerLost as error:
            self._peer_lost(error)

    def _send_value(self, destination: int, key: Key, value: Any, action: Action) -> None:
        """Send a value. What cannot be sent becomes a failure; nothing has left this rank then."""
        if self.poison is not None:
            return
        try:
            parcel = Parcel.of(value)
            if self.agreed is not None and not key.backward:
                before = self.agreed.setdefault((destination, key.stage), parcel.spec)
                if not before.fits(parcel.spec):  # layers may be frozen between steps
                    raise PipelineError(
                        f"its output was {before} for the first micro-batch and is {describe(value)} now; pass "
                        "dynamic_shape=True, or call reset_activation_shape() on every rank before the step in which "
                        "shapes change"
                    )
            self.mailbox.send(destination, key, parcel)
        except PeerLost:
            raise
        except Exception as error:  # noqa: BLE001  (a value that cannot be pickled, a tensor that cannot be sent)
            reason = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
            self._fail(Failure(action.stage, self.rank, action.micro_batch, None, "sending its output", reason))

    def _flush(self) -> None:
        """Consecutive sends are one batch, if payloads are sent in batches."""
        try:
            self.mailbox.flush()
        except PeerLost as error:
            self._peer_lost(error)

    # - failures

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        if self.poison is None:
            self.poison = (FAILURE, failure.pack())

    def _peer_lost(self, error: PeerLost) -> None:
        if error.rank in self.lost:
            return
        self.lost.add(error.rank)
        stages = self.schedule.stages_of(error.rank)
        failure = Failure(stages[0], error.rank, None, None, "communication with it", str(error))
        self.failures.append(failure)
        self.poison = (LOST, failure.pack())
