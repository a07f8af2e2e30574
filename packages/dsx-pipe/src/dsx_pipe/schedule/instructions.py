"""DeepSpeed's public names for schedules: streams of instructions, tick by tick, with numbered buffers.

    for commands in TrainSchedule(micro_batches=4, stages=2, stage_id=0):
        print(commands)          # [LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)] ...

`TrainSchedule` is 1F1B, `InferenceSchedule` forward only, `DataParallelSchedule` plain accumulation on one stage. They
are pure functions of their sizes. Write your own by subclassing `PipeSchedule`; `schedule_of` turns any of them into a
`Schedule`, which can then be validated, simulated, drawn and run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import ScheduleError
from .action import Action, Kind
from .plan import Schedule


class PipeInstruction:
    """One instruction with its arguments as attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.kwargs.items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.kwargs == other.kwargs  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(self.kwargs.items()))))


class OptimizerStep(PipeInstruction):
    """Step the optimizer and clear the gradients, after all reductions."""


class ReduceGrads(PipeInstruction):
    """Reduce the gradients of this stage over its data-parallel ranks."""


class ReduceTiedGrads(PipeInstruction):
    """Reduce the gradients of tied weights over the stages that share them."""


class BufferOpInstruction(PipeInstruction):
    """An instruction that works on the buffer `buffer_id`."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Load a micro-batch from the data iterator into the buffer (first and last stage)."""


class ForwardPass(BufferOpInstruction):
    """Compute the stage's output from the buffer's input."""


class BackwardPass(BufferOpInstruction):
    """Compute the gradients of the buffer's micro-batch."""


class SendActivation(BufferOpInstruction):
    """Send the buffer's output to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the buffer's input from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of the buffer's input to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the buffer's output from the next stage."""


class PipeSchedule:
    """Base class: sizes, neighbouring stages, and iteration over `steps()`.

    Args:
        micro_batches: number of micro-batches of one update.
        stages: number of stages of the pipeline.
        stage_id: this rank's stage, from 0.

    Raises:
        ScheduleError: a number is out of its range.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if micro_batches < 1 or stages < 1 or not 0 <= stage_id < stages:
            raise ScheduleError(
                f"got micro_batches={micro_batches}, stages={stages}, stage_id={stage_id}; expected at least one of "
                "both and 0 <= stage_id < stages"
            )
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each tick."""
        raise NotImplementedError(f"{type(self).__name__} has to define steps()")

    def num_pipe_buffers(self) -> int:
        """Number of buffers that the stage needs."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """Index of this stage."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """True on stage 0."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """True on the last stage."""
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """The buffer of a micro-batch. Micro-batches use the buffers in turn."""
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return iter(self.steps())


class TrainSchedule(PipeSchedule):
    """1F1B in 2 (M + S - 1) ticks for M micro-batches and S stages.

    A stage does forwards in ticks of its own parity (even or odd), and backwards in the others.
    """

    def num_pipe_buffers(self) -> int:
        """max(2, min(S - s, M)) for stage s of S and M micro-batches."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each tick."""
        before, ticks = -1, 2 * (self.micro_batches + self.stages - 1)
        for tick in range(ticks):
            micro_batch, forward = self._micro_batch_at(tick)
            commands = self._forward(micro_batch, before) if forward else self._backward(micro_batch, before)
            if tick == ticks - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = micro_batch
            yield commands

    def _micro_batch_at(self, tick: int) -> tuple[int, bool]:
        """(micro-batch of a tick, True for a forward). A micro-batch outside 0..M-1 means that nothing is computed."""
        if tick % 2 == self.stage_id % 2:
            return tick // 2 - self.stage_id // 2, True
        if tick % 2 == 0:
            return tick // 2 - self.stages + (self.stage_id + 1) // 2, False
        return (tick - 1) // 2 - self.stages + 1 + self.stage_id // 2, False

    def _forward(self, current: int, before: int) -> list[PipeInstruction]:
        found: list[PipeInstruction] = []
        if self._valid_micro_batch(before) and self._valid_stage(self.prev_stage):
            found.append(SendGrad(self._buffer_idx(before)))
        if self._valid_micro_batch(current):
            buffer = self._buffer_idx(current)
            if self._valid_stage(self.prev_stage):
                found.append(RecvActivation(buffer))
            if self.is_first_stage or self.is_last_stage:
                found.append(LoadMicroBatch(buffer))
            found.append(ForwardPass(buffer))
        return found

    def _backward(self, current: int, before: int) -> list[PipeInstruction]:
        found: list[PipeInstruction] = []
        valid = self._valid_micro_batch(current)
        if valid and self._valid_stage(self.next_stage):
            found.append(RecvGrad(self._buffer_idx(current)))
        if self._valid_micro_batch(before) and self._valid_stage(self.next_stage):
            found.append(SendActivation(self._buffer_idx(before)))
        if valid:
            found.append(BackwardPass(self._buffer_idx(current)))
        return found


class InferenceSchedule(PipeSchedule):
    """Forward only, in M + S - 1 ticks with two buffers.

    Stages of even index send before they receive; the others receive before they send.
    """

    def num_pipe_buffers(self) -> int:
        """Two buffers: the stage receives into one buffer while it sends the other."""
        return 2

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each tick."""
        even = self.stage_id % 2 == 0
        for tick in range(self.micro_batches + self.stages - 1):
            current, before = tick - self.stage_id, tick - 1 - self.stage_id
            into, out_of = (tick % 2, (tick + 1) % 2) if even else ((tick + 1) % 2, tick % 2)
            send: list[PipeInstruction] = []
            receive: list[PipeInstruction] = []
            if self._valid_micro_batch(before) and self._valid_stage(self.next_stage):
                send.append(SendActivation(out_of))
            if self._valid_micro_batch(current) and self._valid_stage(self.prev_stage):
                receive.append(RecvActivation(into))
            commands: list[PipeInstruction] = []
            if (self.is_first_stage or self.is_last_stage) and self._valid_micro_batch(current):
                commands.append(LoadMicroBatch(into))
            commands += send + receive if even else receive + send
            if self._valid_micro_batch(current):
                commands.append(ForwardPass(into))
            yield commands


class DataParallelSchedule(PipeSchedule):
    """One stage with plain gradient accumulation and one buffer."""

    def num_pipe_buffers(self) -> int:
        """One buffer."""
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each micro-batch."""
        for micro_batch in range(self.micro_batches):
            commands: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if micro_batch == self.micro_batches - 1:
                commands += [ReduceGrads(), OptimizerStep()]
            yield commands


def schedule_of(kind: type[PipeSchedule], micro_batches: int, stages: int, name: str | None = None) -> Schedule:
    """The instruction streams of all stages as one `Schedule` with explicit sends and receives.

    An input that is loaded or received into a buffer counts as the stage's next micro-batch. Reductions and the
    optimizer's step are left out, because a `Schedule` does not contain them.

    Raises:
        ScheduleError: a stream uses a buffer that is empty, or a buffer number outside `num_pipe_buffers()`.
    """
    rows = tuple(tuple(_actions_of(kind(micro_batches, stages, stage))) for stage in range(stages))
    return Schedule(name or kind.__name__, micro_batches, tuple(range(stages)), rows)


_KINDS: dict[type[PipeInstruction], Kind] = {
    ForwardPass: Kind.FORWARD, BackwardPass: Kind.BACKWARD, SendActivation: Kind.SEND_F, RecvActivation: Kind.RECV_F,
    SendGrad: Kind.SEND_B, RecvGrad: Kind.RECV_B,
}  # fmt: skip


def _actions_of(stream: PipeSchedule) -> Iterator[Action]:
    micro_batch_in: dict[int, int] = {}  # buffer -> its micro-batch
    filled: set[int] = set()  # buffers whose input has not been used by a forward yet
    next_micro_batch = 0
    for instruction in (i for tick in stream for i in tick):
        if not isinstance(instruction, BufferOpInstruction):
            continue
        buffer = instruction.buffer_id
        if not 0 <= buffer < stream.num_pipe_buffers():
            raise ScheduleError(
                f"stage {stream.stage_id}: {instruction}: the buffers are 0..{stream.num_pipe_buffers() - 1}"
            )
        if isinstance(instruction, (LoadMicroBatch, RecvActivation)) and buffer not in filled:
            micro_batch_in[buffer] = next_micro_batch
            next_micro_batch += 1
            filled.add(buffer)
        if buffer not in micro_batch_in:
            raise ScheduleError(f"stage {stream.stage_id}: {instruction}: nothing was loaded into this buffer")
        if isinstance(instruction, ForwardPass):
            filled.discard(buffer)
        kind = _KINDS.get(type(instruction))
        if kind is not None:
            yield Action(stream.stage_id, kind, micro_batch_in[buffer])
