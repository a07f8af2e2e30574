"""The engine of a model that is divided into pipeline stages.

    module = dsx.pipe.PipelineModule(layers, num_stages=2, loss_fn=loss_fn)
    engine, _, loader, _ = dsx.initialize(model=module, training_data=data, config=config)
    loss = engine.train_batch()            # all micro-batches of an update, and the update

Parts, optimizer, precision, loss scale, schedule, observers and checkpoints are those of `Engine`. The difference is
that the schedule of `dsx_pipe` runs forward and backward; it calls back before and after every backward. So `forward`,
`backward` and `step` are refused.

* The micro-batches of an update are its accumulation steps. Below stage 2, gradients are reduced over the data-parallel
  ranks in the last backward of this rank; if backwards of weights are separate, after all of them. From stage 2 on they
  are reduced in every backward, unless `zero_optimization` keeps full gradients.
* A weight that several stages share has a copy on each of them. Their gradients are added up after the last backward;
  only one copy counts in the norm.
* The gradient norm, and with it overflow and clipping, is that of all stages: squares are also summed over the pipe
  axis (`dsx_comm.RankSet.norm_groups`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch

from ..data import RepeatingLoader
from ..utils.logging import logger
from .engine import Engine
from .errors import EngineArgumentError, EngineError
from .parts import EngineParts
from .pipeline_times import PipelineTimes
from .shared_weights import SharedWeights

__all__ = ["PipelineEngine", "PipelineParts"]


@dataclasses.dataclass(frozen=True)
class PipelineParts:
    """The parts of a pipeline in addition to `EngineParts`.

    Attributes:
        build: (engine, micro-batches, callbacks) -> the runtime (`dsx_pipe.Pipeline`).
        callbacks: makes `dsx_pipe.runtime.StageCallbacks`.
        shared: the weights that stages share.
        mean_over_data: returns the mean of a number over the data-parallel ranks.
        check_update: raises what the optimizer's step raises before it communicates.
    """

    build: Callable[..., Any]
    callbacks: Callable[..., Any]
    shared: SharedWeights
    mean_over_data: Callable[[torch.Tensor], torch.Tensor]
    check_update: Callable[[], None]


class PipelineEngine(Engine):
    """Trains one rank's stages; built by `dsx.initialize` for a `dsx.pipe.PipelineModule`."""

    def __init__(self, parts: EngineParts, pipeline: PipelineParts) -> None:
        super().__init__(parts)
        self._pipeline = pipeline
        self._iterator: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None
        self._prepare: Callable[[Any], Any] | None = None
        self._backwards_left = 0
        self._half_done = ""  # why the parameters of the stages belong to different steps, or nothing
        self._pipe = self._build_runtime()
        for observer in parts.watch.observers:
            if isinstance(observer, PipelineTimes):
                observer.follow(self.pipeline_report)

    def _build_runtime(self) -> Any:
        callbacks = self._pipeline.callbacks(
            forward=self._forward_of_stage,
            scale_loss=lambda loss: self._scaled(loss, self.micro_batches),
            before_backward=self._before_backward,
        )
        return self._pipeline.build(self._parts, self.micro_batches, callbacks)

    # - Training

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Run forward and backward of an update's micro-batches, and the update. All ranks call it.

        Args:
            data_iter: gives (inputs, labels) for each of the `gradient_accumulation_steps` micro-batches. Only the
                first and the last stage read it. Default: that of `set_dataiterator` or `set_dataloader`, or the
                training data.

        Returns:
            The mean loss over micro-batches and data-parallel ranks, on every rank, 0-D float32.

        Raises:
            dsx_pipe.StageError: a stage failed; every rank of the pipeline raises it with the same text.
        """
        parts = self._usable()
        if parts.optimizer is None:
            parts.update.stepper.step()  # raises an error that names what is missing
        parts.gate.begin_update()
        source = data_iter if data_iter is not None else self._next_batches()
        self._prepare = self._preparation()
        self._pipe.set_batch_fn(self._read)
        stages = len(self._pipe.stages)
        self._backwards_left = stages * self.micro_batches
        for hook in parts.watch.hooks:
            hook.before_batch()
        try:
            with parts.backwards.known(), self._held(), parts.watch.clock.range("forward_backward"):
                loss = self._pipe.train_batch(source)
            parts.window.close()
            for hook in parts.watch.hooks:
                hook.after_batch()
            with self._pipe.together("preparing the update"):
                self._prepare_update()
        except BaseException:
            self.forget_micro_batches()
            raise
        loss = self._pipeline.mean_over_data(loss)
        self._losses.add(loss)
        self._update_together()
        self.counters.micro_steps += self.micro_batches
        self._after_update()
        return loss

    def _prepare_update(self) -> None:
        """Run the checks that can fail on one stage, before anything is changed. A stage on which they fail still takes
        part in the sums of shared weights, in which others wait for it.
        """
        failed: Exception | None = None
        try:
            self._pipeline.check_update()
            self._before_update()
        except Exception as error:  # noqa: BLE001  (raised below, when the other stages have their sums)
            failed = error
        self._pipeline.shared.sum_gradients()
        if failed is not None:
            raise failed

    def _update_together(self) -> None:
        """Do the update. If it fails on one rank, all raise the same error, and the engine needs a checkpoint: stages
        that have stepped and others that have not are no model.
        """
        self._applied = False
        try:
            with self._pipe.together("the update"):
                report = self._apply_update({})
        except Exception as error:
            self._half_done = (
                f"an update was not done on all ranks, so that the stages belong to different steps; load a checkpoint"
                f" with load_checkpoint, or start again from one. The error was: {error}"
            )
            self.forget_micro_batches()
            raise
        self._end_update(report)

    def _usable(self) -> EngineParts:
        """The parts.

        Raises:
            EngineError: an update has failed on some rank, and no checkpoint was loaded since.
        """
        if self._half_done:
            raise EngineError(self._half_done)
        return self._living()

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run forward only, in evaluation mode and without gradients. All ranks call it.

        Args:
            data_iter: as for `train_batch`.
            return_logits: return (loss, outputs); outputs are None except on the last stage.
            compute_loss: False returns only the outputs.
            reduce_output: "avg" for the mean over micro-batches and data-parallel ranks, None for this pipeline's list.
            bcast_loss: give the loss to all stages; otherwise it is None except on the last one.
            num_micro_batches: number of micro-batches; default: that of an update.
        """
        self._usable().gate.at_rest()
        self._pipe.set_batch_fn(self._batch_fn)
        found = self._pipe.eval_batch(
            data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches
        )
        if not compute_loss or reduce_output != "avg":
            return found
        loss, outputs = found if return_logits else (found, None)
        if loss is not None:
            loss = self._pipeline.mean_over_data(loss)
        return (loss, outputs) if return_logits else loss

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an update."""
        return self._parts.accumulation.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Like `Engine.set_train_batch_size`; it changes the number of micro-batches."""
        super().set_train_batch_size(train_batch_size)
        self._pipe = self._build_runtime()

    def _read(self, item: Any) -> Any:
        """An item of the data, prepared and shown to the hooks."""
        prepare = self._prepare
        item = item if prepare is None else prepare(item)
        for hook in self._parts.watch.hooks:
            hook.micro_batch_read(item)
        return item

    def _preparation(self) -> Callable[[Any], Any] | None:
        """A function for every item of the data: the caller's function, then the curriculum of lengths."""
        prepare, curriculum = self._batch_fn, self._parts.checkpointer.live.parts.get("curriculum_learning")
        if curriculum is None:
            return prepare
        if curriculum.changed():
            self._pipe.reset_activation_shape()
        return curriculum.cut if prepare is None else lambda item: curriculum.cut(prepare(item))

    def _held(self) -> AbstractContextManager[object]:
        """If backwards of weights are separate, gradients arrive until the end. Then they are reduced once, at the end
        of this context.
        """
        if self._pipe.splits_backward:
            return self._parts.window.hold()
        return nullcontext()

    def _forward_of_stage(self, stage: int, micro_batch: int, module: Any, value: Any) -> Any:
        parts = self._parts
        if stage == 0:
            (value,), _ = parts.inputs((value,), {})
        if stage == min(self._pipe.stages):  # once per micro-batch, also if this rank holds several stages
            for hook in parts.watch.hooks:
                hook.before_forward((value,), {})
        with parts.inputs.naming_the_cast(value if stage == 0 else ()), parts.inputs.autocast():
            return parts.module(value, stage=stage)

    def _before_backward(self, stage: int, micro_batch: int, last: bool) -> None:
        self._backwards_left -= 1
        if not self._backwards_left:
            self._pipeline.shared.fill_unused(partial(self._begin_backward, boundary=False))
        self._begin_backward(boundary=self._backwards_left == 0)

    # - Checkpoints

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """See `Engine.save_checkpoint`. Refused after an update that was not done on all ranks."""
        self._usable()
        return super().save_checkpoint(*args, **kwargs)

    store_checkpoint = save_checkpoint

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        """See `Engine.save_16bit_model`. Refused after an update that was not done on all ranks."""
        self._usable()
        return super().save_16bit_model(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any]]:
        """See `Engine.load_checkpoint`. Behind it the engine trains again after an update that failed."""
        found = super().load_checkpoint(*args, **kwargs)
        if found[0] is not None:
            self._half_done = ""
        return found

    # - Data

    def set_dataloader(self, loader: Any) -> None:
        """Train on the micro-batches of this loader, one epoch after the other."""
        self.training_dataloader, self._iterator = loader, None

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Train on the items of this iterator; None: on the loader again."""
        self._iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Apply `fn` to every item of the data before it is used."""
        self._batch_fn = fn

    def _next_batches(self) -> Iterator[Any]:
        if self._iterator is None:
            if self.training_dataloader is None:
                raise EngineArgumentError(
                    "train_batch(): got no data_iter, and there is no training data; pass one, or training_data to "
                    "dsx.initialize, or call set_dataloader"
                )
            self._iterator = RepeatingLoader(self.training_dataloader)
        return self._iterator

    # - The pipeline

    def is_first_stage(self) -> bool:
        """Whether this rank holds the first stage."""
        return self._pipe.is_first_stage

    def is_last_stage(self) -> bool:
        """Whether this rank holds the last stage."""
        return self._pipe.is_last_stage

    def reset_activation_shape(self) -> None:
        """Negotiate shapes again with the next batch. All ranks call it, between two batches."""
        self._pipe.reset_activation_shape()

    def set_has_attention_mask(self, value: bool) -> None:
        """Has no effect here, and warns. DeepSpeed must be told that the last tensor between stages is a mask, so that
        it neither divides it nor gives it a gradient. dsx never does this to tensors of integers or bools.
        """
        if value:
            logger.warning(
                "set_has_attention_mask has no effect: masks (integers, truth values) travel between stages as they are"
            )

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """The module's additional losses by name; None if there are none."""
        module: Any = self._parts.module
        return module.get_additional_losses()

    def pipeline_report(self) -> Any:
        """Times of the last batch per stage, and its bubble, measured and planned (`dsx_pipe.runtime.StepReport`).
        Collective.
        """
        return self._pipe.report()

    # - Calls that a pipeline refuses

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: a single stage is not the model."""
        self._refuse("forward")

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: most stages have no loss."""
        self._refuse("backward")

    def scale(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: most stages have no loss."""
        self._refuse("scale")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Raises: `train_batch` does the update."""
        self._refuse("step")

    def _refuse(self, call: str) -> NoReturn:
        raise EngineError(
            f"{call}(): this engine runs a pipeline, in which forward and backward of all micro-batches follow one "
            "schedule over the ranks; call train_batch(data_iter) or eval_batch(data_iter)",
            code="DSX402",
        )
