"""One step of one rank: its actions in order, with the messages that it receives and sends.

A stage that fails does not stop the schedule. Its rank goes through its remaining actions without computing, receives
the messages of the others, and sends the failure instead of every value. Each rank that receives the failure does the
same. So every send still has its receive, no rank hangs, the queues are empty at the end, and all ranks know of the
failure. Only a rank whose process has ended does not take part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..errors import PipelineError
from ..schedule import Action, Kind, Schedule, Span
from .clock import Clock, DeviceClock
from .data import DataError, MicroBatches
from .failure import Failure, layer_of
from .messages import DATA, FAILURE, LOST, Key, Mailbox, Parcel, PeerLost, Spec
from .stage import NonFiniteGradient, NonFiniteLoss, Stage, as_input
from .structure import describe

_MISSING = object()  # stands for a value that was not computed or received, because something failed


@dataclass(frozen=True)
class Mode:
    """Options of one step.

    Attributes:
        train: compute gradients.
        loss: compute the loss on the last stage.
        keep_outputs: keep the outputs of the last stage.
    """

    train: bool
    loss: bool = True
    keep_outputs: bool = False


class Step:
    """Executes one rank's part of a schedule once.

    Args:
        first_specs: (receiving rank, receiving stage) -> spec of the first output sent there; later outputs must fit
            it. None: shapes may change.
        clock: measures the computations; None: the clock of the device.

    Attributes:
        start: time at which the step began, in seconds (`time.perf_counter`).
        failures: what failed on this rank.
        lost: ranks of the pipeline with which communication failed.
        failure_message: (status, packed failure) that is sent instead of values since a failure is known; else None.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: dict[int, Stage],
        mailbox: Mailbox,
        data: MicroBatches,
        mode: Mode,
        first_specs: dict[tuple[int, int], Spec] | None,
        clock: Clock | None = None,
    ) -> None:
        self.schedule, self.rank, self.stages, self.mailbox = schedule, rank, stages, mailbox
        self.data, self.mode, self.first_specs = data, mode, first_specs
        self.start = time.perf_counter()
        self._clock = DeviceClock(mailbox.groups.device) if clock is None else clock
        self._marks: list[tuple[Action, Any, Any]] = []
        self.failures: list[Failure] = []
        self.lost: set[int] = set()
        self.failure_message: tuple[int, bytes] | None = None
        self._values: dict[Key, Any] = {}  # values that wait for the action that uses or sends them
        self._last = {a.stage: a for a in schedule.actions[rank] if a.kind in (Kind.BACKWARD, Kind.WEIGHT)}

    def run(self) -> None:
        """Execute all actions. Failures are collected, not raised."""
        for stage in self.stages.values():
            stage.begin()
        for computes, part in groupby(self.schedule.actions[self.rank], lambda action: action.kind.computes):
            for action in part:
                if computes:
                    self._compute(action)
                elif action.kind.sends:
                    self._send(action)
                else:
                    self._values[self._message_key(action)] = self._receive(
                        action.peer_stage(), self._message_key(action)
                    )
            if not computes:
                self._flush()
        try:
            self.mailbox.wait_sent(self.lost)
        except PeerLost as error:
            self._peer_lost(error)

    @property
    def spans(self) -> list[Span]:
        """Start and end of each computation, in the order of execution. Waits for the device."""
        seconds = self._clock.seconds
        return [Span(self.rank, action, seconds(start), seconds(end)) for action, start, end in self._marks]

    # - computing

    def _compute(self, action: Action) -> None:
        arrived = _MISSING if action.kind is Kind.WEIGHT else self._input(action)
        result = _MISSING
        if self.failure_message is None:
            result = self._compute_or_fail(action, arrived)
        if action.kind is Kind.WEIGHT:
            return
        key = self._consumer_key(action)
        if key is None:
            return
        crosses_ranks = self.schedule.stage_ranks[key.stage] != self.rank
        if crosses_ranks and self.schedule.communicates:
            self._values[key] = result  # an explicit send follows
        elif crosses_ranks:
            self._post(key, result, action)
        elif result is not _MISSING:
            self._values[key] = result if key.backward else as_input(result)

    def _compute_or_fail(self, action: Action, arrived: Any) -> Any:
        """Run the computation; an exception becomes a failure of this stage."""
        operation = {Kind.FORWARD: "forward", Kind.WEIGHT: "weight backward"}.get(action.kind, "backward")
        stage, labels = self.stages[action.stage], None
        try:
            if action.kind is Kind.FORWARD:
                arrived, labels = self._load_data(action, arrived)
            start = self._clock.mark(action)
            result = self._run(action, arrived, labels)
            self._marks.append((action, start, self._clock.mark(action)))
            return result
        except PeerLost as error:
            self._peer_lost(error)
        except NonFiniteLoss as error:
            self._fail(action.stage, error.micro_batch, None, "forward", str(error), nonfinite=True)
        except NonFiniteGradient as error:
            self._fail(action.stage, error.micro_batch, error.layer, operation, str(error))
        except Exception as error:  # noqa: BLE001  (every rank must be told, whatever the error is)
            layer = layer_of(stage.module, error.__traceback__) if action.kind is Kind.FORWARD else None
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, PipelineError):
                reason, operation = str(error), "loading data" if isinstance(error, DataError) else operation
            elif action.kind is Kind.FORWARD:
                reason += self._context(stage, arrived, labels)
            self._fail(action.stage, action.micro_batch, layer, operation, reason)
        return _MISSING

    @staticmethod
    def _context(stage: Stage, arrived: Any, labels: Any) -> str:
        """Describe the arguments of a forward that failed."""
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

    def _load_data(self, action: Action, arrived: Any) -> tuple[Any, Any]:
        first, last = action.stage == 0, self.stages[action.stage].is_last
        needs_labels = last and self.mode.loss and self.stages[action.stage].loss_fn is not None
        inputs, labels = self.data.get(action.micro_batch) if first or needs_labels else (None, None)
        return (inputs if first else arrived), labels

    # - messages

    def _message_key(self, action: Action) -> Key:
        """The key of the message that a send or receive transfers."""
        stage = action.peer_stage() if action.kind.sends else action.stage
        return Key(stage, action.kind in (Kind.SEND_B, Kind.RECV_B), action.micro_batch)

    def _consumer_key(self, action: Action) -> Key | None:
        """The key of the result of a computation; None if no stage needs it."""
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
            return self._values.pop(key, _MISSING)
        return self._receive(source, key)

    def _receive(self, source_stage: int, key: Key) -> Any:
        source = self.schedule.stage_ranks[source_stage]
        if source in self.lost:
            return _MISSING
        try:
            message = self.mailbox.receive(source, key)
        except PeerLost as error:
            self._peer_lost(error)
            return _MISSING
        if message.status == DATA:
            return message.value
        if self.failure_message is None or message.status == LOST:
            self.failure_message = (message.status, message.text)
        return _MISSING

    def _send(self, action: Action) -> None:
        key = self._message_key(action)
        self._post(key, self._values.pop(key, _MISSING), action)

    def _post(self, key: Key, value: Any, action: Action) -> None:
        destination = self.schedule.stage_ranks[key.stage]
        if destination in self.lost:
            return
        try:
            if value is not _MISSING:
                self._send_value(destination, key, value, action)
            if self.failure_message is not None:
                self.mailbox.send_failure(destination, key, *self.failure_message)
        except PeerLost as error:
            self._peer_lost(error)

    def _send_value(self, destination: int, key: Key, value: Any, action: Action) -> None:
        """Send a value. If it cannot be sent, record a failure; no part of the value was sent then."""
        if self.failure_message is not None:
            return
        try:
            parcel = Parcel.of(value)
            if self.first_specs is not None and not key.backward:
                before = self.first_specs.setdefault((destination, key.stage), parcel.spec)
                if not before.fits(parcel.spec):  # requires_grad may change, because layers may be frozen between steps
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
            self._fail(action.stage, action.micro_batch, None, "sending its output", reason)

    def _flush(self) -> None:
        """Send the payloads of consecutive sends as one batch, if payloads are sent in batches."""
        try:
            self.mailbox.flush()
        except PeerLost as error:
            self._peer_lost(error)

    # - failures

    def attempt(self, operation: str, action: Callable[[], object]) -> None:
        """Do something behind the schedule that belongs to the step; an exception becomes a failure of this rank."""
        if self.failure_message is None:
            try:
                action()
            except Exception as error:  # noqa: BLE001  (every rank must be told, whatever the error is)
                reason = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
                self._fail(min(self.stages), None, None, operation, reason)

    def _fail(
        self,
        stage: int,
        micro_batch: int | None,
        layer: str | None,
        operation: str,
        reason: str,
        *,
        nonfinite: bool = False,
    ) -> None:
        rank = self.mailbox.groups.world_rank
        failure = Failure(stage, rank, micro_batch, layer, operation, reason, nonfinite=nonfinite)
        self.failures.append(failure)
        if self.failure_message is None:
            self.failure_message = (FAILURE, failure.pack())

    def _peer_lost(self, error: PeerLost) -> None:
        if error.rank in self.lost:
            return
        self.lost.add(error.rank)
        stages = self.schedule.stages_of(error.cause)
        rank = self.mailbox.groups.ranks[error.cause]
        failure = Failure(stages[0], rank, None, None, "communication with it", str(error))
        self.failures.append(failure)
        self.failure_message = (LOST, failure.pack())
