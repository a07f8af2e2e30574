"""`Pipeline` executes a schedule over the ranks of a group, with any module as a stage.

    plan = dsx_pipe.build("zb-h1", ranks=2, micro_batches=8)
    pipe = dsx_pipe.Pipeline(my_stage, plan, loss_fn=torch.nn.functional.cross_entropy)
    loss = pipe.step(inputs, labels)         # forward and backward of all micro-batches; gradients are in .grad
    optimizer.step(); optimizer.zero_grad()

A stage takes one argument, the output of the stage before it (the data's inputs on the first stage), and returns one
value: a tensor, or tuples, lists, dicts and dataclasses of tensors and other values. A tensor that requires a gradient
on the sending stage also requires one on the receiving stage.

The optimizer, data-parallel reduction and precision are not part of it: an engine adds them through `StageCallbacks`.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dsx_comm
import torch
from torch import nn

from ..errors import PipelineError, ScheduleError, StageError
from ..schedule import Action, Schedule, Span, build, check, inference_over, with_communication
from .clock import Clock
from .data import MicroBatches, split_batch
from .failure import Failure, first_of
from .messages import LOST, Groups, Mailbox, Spec
from .report import StepReport, make_report
from .stage import Stage, StageCallbacks
from .step import Mode, Step

_TRAIN, _EVAL = 1, 2


class Pipeline:
    """One rank of a pipeline.

    Args:
        stage_module: this rank's stage; a list of them, in the order of the stages, where the schedule gives a rank
            several; or a `PipelineModule`.
        schedule: a `Schedule`, or the name of one, which needs `micro_batches`.
        group: process group of the pipeline; rank r of the group is rank r of the schedule. Default: the pipe axis of a
            `PipelineModule`, else the world.
        micro_batches: number of micro-batches, for a schedule given by name.
        loss_fn: (output, labels) -> scalar on the last stage; None: the module's `loss_fn`, and if it has none the
            output is the loss.
        device: device of received tensors; default: that of the module's parameters, else the CPU.
        dynamic_shape: shapes may differ between micro-batches and steps; False: a change is an error. Default: the
            module's `dynamic_shape`, else False.
        nonfinite: "raise" ends a training step in which a loss or a gradient is not finite with an error on every rank
            that names where that began; "ignore" goes on (for mixed precision, which skips such steps).
        find_layer: with "raise", run a stage once more to find the layer. Pass False if running a stage is collective
            over ranks that have not failed.
        split_backward: False: a zero-bubble schedule computes the whole backward in its input part.
        callbacks: functions that an engine runs within a step.
        batch_fn: applied to every item of a data iterator; it returns (inputs, labels).
        slice_group: ranks that slice this stage's layers. Activations and gradients between stages are equal on all of
            them, so each rank sends a piece and the receivers gather. Not for sequence-parallel stages, whose outputs
            differ between the ranks.
        pipe_partitioned: with `slice_group`, send activations in pieces.
        grad_partitioned: with `slice_group`, send gradients in pieces.
        batched_messages: send payloads in batches, in an order in which a send may wait for its receive. On a device
            they are always sent so (`messages.py`).
        reduce_tied_gradients: sum the gradients of a `PipelineModule`'s shared weights after each step; False: the
            engine does it.

    Attributes:
        clock: measures the computations of the next steps; None: the clock of the device.
        mailbox: this rank's messages.
        stands_for: for a rehearsal with fewer micro-batches than the job has: the job's number of micro-batches. The
            messages after a step then have the sizes of the job.

    All ranks of the group construct it together.

    Raises:
        ScheduleError: the schedule is not valid, or does not fit the group.
        PipelineError: the number of modules is not the number of this rank's stages.
    """

    def __init__(
        self,
        stage_module: Any,
        schedule: Schedule | str,
        group: Any = None,
        *,
        micro_batches: int | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        device: torch.device | str | None = None,
        dynamic_shape: bool | None = None,
        nonfinite: str = "raise",
        find_layer: bool = True,
        split_backward: bool = True,
        callbacks: StageCallbacks | None = None,
        batch_fn: Callable[[Any], Any] | None = None,
        slice_group: Any = None,
        pipe_partitioned: bool = True,
        grad_partitioned: bool = True,
        batched_messages: bool = False,
        reduce_tied_gradients: bool = True,
    ) -> None:
        if nonfinite not in ("raise", "ignore"):
            raise PipelineError(f"nonfinite: got {nonfinite!r}, expected 'raise' or 'ignore'")
        self.module = stage_module
        parts = _stage_modules_of(stage_module)
        if group is None:
            group = getattr(stage_module, "pipe_group", None)
        self.groups = Groups(group, _device_of(parts, device), batched=batched_messages)
        self.schedule = _schedule_of(schedule, micro_batches, stage_module, self.groups.size)
        self.rank = self.groups.rank
        self.dynamic_shape = (
            bool(getattr(stage_module, "dynamic_shape", False)) if dynamic_shape is None else dynamic_shape
        )
        self.clock: Clock | None = None
        self.stands_for: int | None = None
        self._batch_fn, self._reduces_ties = batch_fn, reduce_tied_gradients
        loss_fn = loss_fn if loss_fn is not None else getattr(stage_module, "loss_fn", None)
        mine = self.schedule.stages_of(self.rank)
        if len(mine) != len(parts):
            raise PipelineError(
                f"rank {self.rank}: got {len(parts)} modules, expected {len(mine)}: schedule "
                f"{self.schedule.name!r} gives this rank the stages {list(mine)}"
            )
        self.stages = {
            index: Stage(
                index, module, index == self.schedule.stages - 1, loss_fn, callbacks or StageCallbacks(),
                nonfinite == "raise", split_backward, getattr(stage_module, "get_additional_losses", None), find_layer,
            )
            for index, module in zip(mine, parts)
        }  # fmt: skip
        slicing = (slice_group if pipe_partitioned else None, slice_group if grad_partitioned else None)
        self.mailbox = Mailbox(self.groups, self._name_of, slicing)
        self._additional: dict[str, float] = {}
        self._first_specs: dict[tuple[int, int], Spec] = {}
        self._iterator: Iterator[Any] | None = None
        self._last_step: Step | None = None
        self._evaluations: dict[int, Schedule] = {}
        self._digests: dict[int, tuple[Schedule, int]] = {}
        self._plans_with_messages: dict[int, tuple[Schedule, Schedule]] = {}
        self._last_schedule = self.schedule

    # - public interface

    @property
    def is_first_stage(self) -> bool:
        """True on the rank that holds stage 0."""
        return 0 in self.stages

    @property
    def is_last_stage(self) -> bool:
        """True on the rank that holds the last stage."""
        return self.schedule.stages - 1 in self.stages

    @property
    def splits_backward(self) -> bool:
        """True if the schedule splits the backward and `split_backward` allows it."""
        return self.schedule.splits_backward and all(stage.split for stage in self.stages.values())

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a training step."""
        return self.schedule.micro_batches

    def step(self, inputs: Any = None, labels: Any = None) -> torch.Tensor:
        """Run forward and backward of one batch, split along the first dimension into the schedule's micro-batches.

        Gradients are added to `.grad`.

        Args:
            inputs: inputs of the first stage; other ranks may leave it out.
            labels: for the loss; only the rank of the last stage needs them.

        Returns:
            The mean of the micro-batches' losses, on every rank, as a 0-D float32 tensor.

        Raises:
            StageError: a stage failed, or the batch cannot be split into equal micro-batches; every rank raises it with
                the same text.
            PipelineError: the ranks are not about to do the same, or the process of a rank has ended.
        """
        return self.train_batch(split_batch(inputs, labels, self.micro_batches))

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """As `step`, with an iterator over micro-batches, each a pair (inputs, labels).

        Each micro-batch has the same weight in the loss and the gradients, also where their sizes differ.

        Only ranks with the first or the last stage read from it, one item per micro-batch. Without an iterator the one
        of `set_dataiterator` is used.
        """
        losses, _ = self._run(self.schedule, Mode(train=True), data_iter, _TRAIN)
        return _mean(losses, self.groups.device)

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Forward only, in evaluation mode and without gradients.

        Args:
            data_iter: iterator over micro-batches, as for `train_batch`.
            return_logits: return (loss, outputs) instead of the loss; outputs are None except on the last stage.
            compute_loss: False returns the outputs alone.
            reduce_output: "avg" for the mean loss, None for a list with one loss per micro-batch.
            bcast_loss: return the loss on every rank; False: it is None except on the last stage.
            num_micro_batches: number of micro-batches; default: as many as in training.

        Returns:
            The loss, (loss, outputs) or the outputs, as the arguments say. A mean loss is a 0-D float32 tensor. Outputs
            are one tensor [rows of all micro-batches, ...] if they fit together, else a list.

        Raises:
            StageError: a stage failed; every rank raises it with the same text.
            PipelineError: `reduce_output` is unknown, or the ranks are not about to do the same.
        """
        if reduce_output not in ("avg", None):
            raise PipelineError(f"reduce_output: got {reduce_output!r}, expected 'avg' or None")
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        plan = self._evaluation(count)
        mode = Mode(train=False, loss=compute_loss, keep_outputs=return_logits or not compute_loss)
        modules = [s.module for s in self.stages.values() if isinstance(s.module, nn.Module)]
        training = [m for module in modules for m in module.modules() if m.training]
        for module in modules:
            module.eval()
        try:
            losses, outputs = self._run(plan, mode, data_iter, _EVAL)
        finally:
            for module in training:
                module.training = True
        if not compute_loss:
            return outputs
        loss: Any = None
        if bcast_loss or self.is_last_stage:
            device = self.groups.device
            loss = _mean(losses, device) if reduce_output == "avg" else [torch.tensor(x, device=device) for x in losses]
        return (loss, outputs) if return_logits else loss

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Set the iterator that steps read from if they are called without one."""
        self._iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Read micro-batches from this loader, in one pass over it."""
        self._iterator = iter(loader) if loader is not None else None

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Apply `fn` to every item of the data iterator before it is used."""
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Let shapes change with the next micro-batch. All ranks call it, between two steps."""
        self._first_specs.clear()
        self.mailbox.forget_shapes()

    def most_kept(self) -> dict[int, int]:
        """For each stage of this rank, the most micro-batches whose activations the last step kept at one time."""
        return {index: stage.most_kept for index, stage in self.stages.items()}

    def spans(self) -> list[Span]:
        """This rank's computations in the last step, in their order, in seconds of the pipeline's clock."""
        return [] if self._last_step is None else self._last_step.spans

    def get_additional_losses(self) -> dict[str, float]:
        """Further losses of the last step by name, on every rank. Each is the mean over the micro-batches.

        They come from the module's `get_additional_losses`, which is called after every loss on the last stage.
        """
        return dict(self._additional)

    def report(self) -> StepReport:
        """The times of the last step, compared with its ideal. All ranks call it and get the same report.

        Raises:
            PipelineError: there was no step yet.
        """
        if self._last_step is None:
            raise PipelineError("there is no step to report: call train_batch or eval_batch first")
        rows: list[Any] = [None] * self.groups.size
        step = self._last_step
        mine = [(s.rank, str(s.action), s.start, s.end) for s in step.spans]
        dsx_comm.all_gather_object(rows, (mine, self.most_kept(), step.start, platform.node()), group=self.groups.host)
        # clocks of several hosts cannot be compared, so times count from the step's start, which is common to all ranks
        clocks_differ = len({row[3] for row in rows}) > 1
        spans = [
            Span(rank, Action.parse(action), start - clocks_differ * began, end - clocks_differ * began)
            for row, _, began, _ in rows for rank, action, start, end in row
        ]  # fmt: skip
        kept = {stage: n for row in rows for stage, n in row[1].items()}
        return make_report(self._last_schedule, spans, [kept.get(s, 0) for s in range(self.schedule.stages)])

    # - a step

    def _run(self, plan: Schedule, mode: Mode, data_iter: Iterator[Any] | None, kind: int) -> tuple[list[float], Any]:
        self.mailbox.begin_run()
        self._check_same_step(plan, kind)
        source = data_iter if data_iter is not None else self._iterator
        data = MicroBatches(source, plan.micro_batches, self.groups.device, self._batch_fn)
        first_specs = self._first_specs if mode.train and not self.dynamic_shape else None
        step = Step(
            self._plan_with_messages(plan), self.rank, self.stages, self.mailbox, data, mode, first_specs, self.clock
        )
        step.run()
        self._last_step, self._last_schedule = step, plan
        losses = self._finish(step, plan, mode)
        # after _finish: before it a rank may not know that another one failed, and would wait for that rank here
        if mode.train and self._reduces_ties and hasattr(self.module, "allreduce_tied_weight_gradients"):
            self.module.allreduce_tied_weight_gradients()
        outputs = None
        if mode.keep_outputs and self.is_last_stage:
            kept = self.stages[self.schedule.stages - 1].outputs
            outputs = _join_outputs([kept[m] for m in range(plan.micro_batches)])
        return losses, outputs

    def _check_same_step(self, plan: Schedule, kind: int) -> None:
        """Raise an error on every rank if the ranks are not about to do the same (collective)."""
        mine = torch.tensor([self._digest_of(plan), kind, int(self.dynamic_shape), self.mailbox.run], dtype=torch.int64)
        rows = self._gather_rows(mine)
        if all(row == rows[0] for row in rows):
            return
        texts: list[Any] = [None] * self.groups.size
        call = {_TRAIN: "train_batch", _EVAL: "eval_batch"}[kind]
        description = (
            f"{call}, {plan.name} with {plan.micro_batches} micro-batches over {plan.stages} stages, step "
            f"{self.mailbox.run}{', dynamic shapes' if self.dynamic_shape else ''}"
        )
        dsx_comm.all_gather_object(texts, description, group=self.groups.host)
        listed = "\n  ".join(f"{self._name_of(r)}: {text}" for r, text in enumerate(texts))
        raise PipelineError(f"the ranks of the pipeline are not about to do the same:\n  {listed}")

    def _digest_of(self, plan: Schedule) -> int:
        """A hash of a plan. It is cached, because hashing a large plan takes milliseconds."""
        found = self._digests.get(id(plan))
        if found is None or found[0] is not plan:
            digest = int.from_bytes(hashlib.sha256(str(plan).encode()).digest()[:7], "big")
            found = self._digests[id(plan)] = (plan, digest)
        return found[1]

    def _plan_with_messages(self, plan: Schedule) -> Schedule:
        """The plan to execute: with explicit messages if they are sent in batches, else as it is."""
        if not self.groups.batched or plan.communicates or self.groups.size == 1:
            return plan
        found = self._plans_with_messages.get(id(plan))
        if found is None or found[0] is not plan:
            found = self._plans_with_messages[id(plan)] = (plan, with_communication(plan))
        return found[1]

    def _evaluation(self, count: int) -> Schedule:
        """The plan of an evaluation over `count` micro-batches."""
        if count not in self._evaluations:
            self._evaluations[count] = inference_over(self.schedule.stage_ranks, count)
        return self._evaluations[count]

    def _finish(self, step: Step, plan: Schedule, mode: Mode) -> list[float]:
        """Return the losses of all micro-batches on every rank, or raise the same error on every rank (collective)."""
        if step.lost or (step.failure_message and step.failure_message[0] == LOST):
            raise self._end_failed_step(
                [Failure.unpack(step.failure_message[1])] if step.failure_message else step.failures
            )
        count = plan.micro_batches if self.stands_for is None else self.stands_for
        row = torch.zeros(2 + count, dtype=torch.float64)  # failed, has further losses, losses
        row[0] = float(step.failure_message is not None)
        has_loss = self.is_last_stage and mode.loss
        if has_loss and step.failure_message is None:
            last = self.stages[self.schedule.stages - 1]
            row[1] = float(bool(last.extras))
            row[2 : 2 + plan.micro_batches] = torch.stack(
                [last.losses[m].reshape(()).double() for m in range(plan.micro_batches)]
            ).cpu()  # one wait for the device, at the end of the step
        rows = self._gather_rows(row)
        if not any(r[0] for r in rows):
            final = rows[self.schedule.stage_ranks[-1]]
            self._additional = self._broadcast_extras() if final[1] else {}
            return final[2 : 2 + plan.micro_batches]
        gathered: list[Any] = [None] * self.groups.size
        packed = [f.pack().decode() for f in step.failures]
        dsx_comm.all_gather_object(gathered, json.dumps(packed), group=self.groups.host)
        failures = [Failure.unpack(text.encode()) for entry in gathered for text in json.loads(entry)]
        failure = first_of(failures)
        raise self._end_failed_step([self._locate_nonfinite(failure) if failure.nonfinite else failure])

    def _broadcast_extras(self) -> dict[str, float]:
        """Give every rank the means of the last stage's further losses over the micro-batches (collective)."""
        row: list[Any] = [None]
        if self.is_last_stage:
            extras = self.stages[self.schedule.stages - 1].extras
            row = [{name: sum(float(v) for v in values) / len(values) for name, values in extras.items()}]
        source = self.groups.ranks[self.schedule.stage_ranks[-1]]
        dsx_comm.broadcast_object_list(row, src=source, group=self.groups.host)
        return row[0]

    def _locate_nonfinite(self, failure: Failure) -> Failure:
        """Find where a loss stopped being finite: the first stage whose input is finite and whose output is not."""
        found = None
        for index, stage in sorted(self.stages.items()):
            if failure.micro_batch is None or found is not None:
                break
            try:
                place = stage.where_nonfinite(failure.micro_batch)
            except Exception:  # noqa: BLE001  (the search must not hide the failure that it explains)
                continue
            if place is not None:
                found = (index, self.rank, *place)
        answers: list[Any] = [None] * self.groups.size
        dsx_comm.all_gather_object(answers, json.dumps(found), group=self.groups.host)
        known = sorted(tuple(a) for a in map(json.loads, answers) if a is not None)
        if not known:
            return failure
        index, rank, what, layer = known[0]
        reason = f"{failure.reason}; this is the first stage where {what} are not finite"
        return Failure(index, rank, failure.micro_batch, layer, "forward", reason, nonfinite=True)

    def _gather_rows(self, row: torch.Tensor) -> list[list[Any]]:
        """The rows of all ranks, by rank (collective)."""
        table = torch.empty((self.groups.size, row.numel()), dtype=row.dtype)
        try:
            dsx_comm.all_gather_into_tensor(table.view(-1), row, group=self.groups.host)
        except RuntimeError as error:
            hangs = isinstance(error, dsx_comm.HangError)
            what = "has not come to this step" if hangs else "is gone"
            raise PipelineError(f"a rank of the pipeline {what}: {type(error).__name__}: {error}") from error
        return table.tolist()

    def _end_failed_step(self, failures: list[Failure]) -> StageError:
        """Drop everything that the failed step has kept, and return the error to raise."""
        for stage in self.stages.values():
            stage.begin()
        return first_of(failures).error()

    def _name_of(self, rank: int) -> str:
        stages = ", ".join(map(str, self.schedule.stages_of(rank)))
        return f"stage {stages} (rank {rank})"


def _stage_modules_of(stage_module: Any) -> list[Any]:
    chunks = getattr(stage_module, "stage_modules", None)
    if chunks is not None:
        return list(chunks)
    if isinstance(stage_module, Sequence) and not isinstance(stage_module, nn.Module):
        return list(stage_module)
    return [stage_module]


def _device_of(parts: list[Any], device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    for part in parts:
        if isinstance(part, nn.Module):
            for parameter in part.parameters():
                return parameter.device
    return torch.device("cpu")


def _schedule_of(schedule: Schedule | str, micro_batches: int | None, module: Any, ranks: int) -> Schedule:
    if isinstance(schedule, str):
        if micro_batches is None:
            raise ScheduleError(f"schedule {schedule!r}: pass micro_batches=... with the name of a schedule")
        chunks = len(getattr(module, "stage_modules", ())) or (
            len(module) if isinstance(module, (list, tuple)) else None
        )
        schedule = build(schedule, ranks, micro_batches, chunks if schedule in ("interleaved", "inference") else None)
    elif micro_batches not in (None, schedule.micro_batches):
        raise ScheduleError(f"micro_batches: got {micro_batches}, the schedule has {schedule.micro_batches}")
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"schedule: got {type(schedule).__name__}, expected a Schedule or a name like '1f1b'")
    check(schedule)
    if schedule.ranks != ranks:
        raise ScheduleError(f"schedule {schedule.name!r} has {schedule.ranks} ranks, the group has {ranks}")
    placed = getattr(module, "stage_ranks", None)
    if placed is not None and tuple(placed) != schedule.stage_ranks:
        raise ScheduleError(
            f"schedule {schedule.name!r} puts the stages on the ranks {list(schedule.stage_ranks)}, the module has "
            f"them on {list(placed)}; build the PipelineModule with schedule={schedule.name!r}"
        )
    return schedule


def _mean(losses: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(sum(losses) / max(len(losses), 1), dtype=torch.float32, device=device)


def _join_outputs(outputs: list[Any]) -> Any:
    """The outputs of all micro-batches: one tensor if they are tensors that can be concatenated, else a list."""
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    fits = (
        len(tensors) == len(outputs)
        and len({(t.shape[1:], t.dim() > 0) for t in tensors}) == 1
        and tensors[0].dim() > 0
    )
    return torch.cat(tensors) if fits else outputs
