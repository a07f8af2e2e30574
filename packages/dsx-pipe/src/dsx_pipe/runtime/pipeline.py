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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..errors import PipelineError, ScheduleError
from ..schedule import Schedule, Span, build, check, inference_over, with_communication
from ..ties import Ties
from .agreement import EVAL, TRAIN, Agreement
from .clock import Clock
from .data import MicroBatches, split_batch
from .groups import Groups
from .messages import Mailbox, Spec
from .report import StepReport, gather_report
from .stage import Stage, StageCallbacks
from .step import Mode, Step
from .structure import join_outputs


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
        everyone: group that can send host tensors, of the ranks that `together` lets fail together; an engine passes
            those of all pipelines. Default: the ranks of this pipeline.

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
        everyone: Any = None,
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
        self._agreement = Agreement(self.groups, self.schedule, self.stages, everyone)
        self.mailbox = Mailbox(self.groups, self._agreement.name_of, slicing)
        self._additional: dict[str, float] = {}
        self._first_specs: dict[tuple[int, int], Spec] = {}
        self._iterator: Iterator[Any] | None = None
        self._last_step: Step | None = None
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
        """Like `step`, with an iterator over micro-batches, each a pair (inputs, labels).

        Each micro-batch has the same weight in the loss and the gradients. So their numbers of rows must be equal,
        unless `dynamic_shape` says that they may differ and have the same weight nevertheless.

        Only ranks with the first or the last stage read from it, one item per micro-batch. Without an iterator the one
        of `set_dataiterator` is used.
        """
        losses, _ = self._run(self.schedule, Mode(train=True), data_iter, TRAIN)
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
        plan = inference_over(self.schedule.stage_ranks, count)
        mode = Mode(train=False, loss=compute_loss, keep_outputs=return_logits or not compute_loss)
        modules = [s.module for s in self.stages.values() if isinstance(s.module, nn.Module)]
        training = [m for module in modules for m in module.modules() if m.training]
        for module in modules:
            module.eval()
        try:
            losses, outputs = self._run(plan, mode, data_iter, EVAL)
        finally:
            for module in training:
                module.training = True
        if not compute_loss:
            return outputs
        loss: Any = None
        if bcast_loss or self.is_last_stage:
            device = self.groups.device
            loss = _mean(losses, device) if reduce_output == "avg" else [_mean([x], device) for x in losses]
        return (loss, outputs) if return_logits else loss

    def together(self, doing: str) -> AbstractContextManager[None]:
        """A block that every rank runs after a step: if it fails on one of them, all ranks raise the same error.

            loss = pipe.step(inputs, labels)
            with pipe.together("the optimizer step"):
                optimizer.step()

        The ranks agree at the end of the block (collective). So a rank that fails must not leave another one waiting
        for it inside the block: the block has no communication between stages.

        Args:
            doing: what the block does, for the error.

        Raises:
            StageError: at the end of the block, on every rank with the same text, if the block failed on one of them.
                The rank that failed has its own error as `__cause__`.
            PipelineError: the process of a rank has ended.
        """
        return self._agreement.together(doing)

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
        return gather_report(self._last_schedule, self._last_step, self.most_kept(), self.groups.host)

    # - a step

    def _run(self, plan: Schedule, mode: Mode, data_iter: Iterator[Any] | None, kind: int) -> tuple[list[float], Any]:
        self.mailbox.begin_run()
        self._agreement.check_same_step(plan, kind, self.mailbox.run, dynamic_shape=self.dynamic_shape)
        source = data_iter if data_iter is not None else self._iterator
        data = MicroBatches(
            source,
            plan.micro_batches,
            self.groups.device,
            self._batch_fn,
            equal_rows=mode.train and not self.dynamic_shape,
        )
        first_specs = self._first_specs if mode.train and not self.dynamic_shape else None
        step = Step(
            self._plan_with_messages(plan), self.rank, self.stages, self.mailbox, data, mode, first_specs, self.clock
        )
        step.run()
        reduces_ties = mode.train and self._reduces_ties and hasattr(self.module, "allreduce_tied_weight_gradients")
        if reduces_ties and isinstance(ties := getattr(self.module, "ties", None), Ties):
            step.attempt("preparing the gradients of shared weights", ties.prepare_gradients)
        self._last_step, self._last_schedule = step, plan
        losses, self._additional = self._agreement.end_step(step, plan, self.stands_for)
        # Behind it: before it a rank may not know that another one failed, and would wait for that rank here.
        if reduces_ties:
            self.module.allreduce_tied_weight_gradients()
        outputs = None
        if mode.keep_outputs and self.is_last_stage:
            kept = self.stages[self.schedule.stages - 1].outputs
            outputs = join_outputs([kept[m] for m in range(plan.micro_batches)])
        return losses, outputs

    def _plan_with_messages(self, plan: Schedule) -> Schedule:
        """The plan to execute: with explicit messages if they are sent in batches, else as it is."""
        if not self.groups.batched or plan.communicates or self.groups.size == 1:
            return plan
        found = self._plans_with_messages.get(id(plan))
        if found is None or found[0] is not plan:
            found = self._plans_with_messages[id(plan)] = (plan, with_communication(plan))
        return found[1]


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
    # filled on the device: the host would wait for a copy
    return torch.full((), sum(losses) / max(len(losses), 1), dtype=torch.float32, device=device)
