"""The engine: one model, one optimizer, and the three calls of a training step.

    loss = engine(*batch)          # inputs cast, module run
    engine.backward(loss)          # loss x scale / accumulation, autograd, gradients reduced as units complete
    engine.step()                  # at a boundary: unscale, check, clip, update, schedule, report

`loss.backward()` instead of `engine.backward(loss)` gives the same gradients, or raises if it cannot (see
`backwards.py`).

The engine holds parts that were chosen once from the configuration (see `parts.py`); this module never asks whether a
feature is on. The loss is scaled in `backward` and not in the forward pass, so a term that is added to the loss
afterwards is scaled too.

Left out: pipelines (`pipeline.py` has another engine), several optimizers in one engine (build one engine per model).
"""

from __future__ import annotations

import dataclasses
import gc
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..data import TrainingLoader
from .accessors import BatchInfo, EngineAccessors
from .as_module import EngineModule
from .backwards import LossSum
from .by_hand import EngineByHand
from .checkpoints import EngineCheckpoints
from .efficiency import EngineData
from .errors import EngineArgumentError, EngineError
from .parts import EngineParts
from .report import StepReport
from .saving import WeightsMixin
from .stepper import learning_rates

_ROUTES = ("train", "eval", "predict")


class Engine(EngineCheckpoints, WeightsMixin, EngineByHand, EngineData, EngineAccessors, EngineModule):
    """Trains `module`; built by `dsx.initialize`. It is an `nn.Module` whose only child is `module`
    (`as_module.py`).
    """

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts.module)
        self._parts = parts
        self._losses = LossSum()
        self._custom_batch: int | None = None
        self._alive = True
        self.counters = parts.counters
        self.last_step: StepReport | None = None
        self.training_dataloader: Any = None
        self.sequence_parallel = parts.watch.sequence_parallel

    # - Training step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on a micro-batch and return its result.

        Inputs are cast if `bf16.auto_cast` or `fp16.auto_cast` says so.

        Raises:
            EngineError: the inputs have another floating-point dtype than the parameters, and the model cannot do that.
        """
        parts = self._living()
        if torch.is_grad_enabled():
            parts.gate.begin_update()
            parts.watch.batches.before_forward()
        else:
            parts.gate.at_rest()
        args, kwargs = parts.inputs(args, kwargs)
        for hook in parts.watch.hooks:
            hook.before_forward(args, kwargs)
        with parts.watch.clock.range("forward"), parts.inputs.naming_the_cast(args, kwargs), parts.inputs.autocast():
            return parts.module(*args, **kwargs)

    def scale(self, loss: torch.Tensor, scale_wrt_gas: bool = True) -> torch.Tensor:
        """The loss to call `.backward()` on by hand: `loss * loss_scale / accumulation steps`, in fp32.

        Args:
            loss: one floating-point number that depends on the model, any shape with one element.
            scale_wrt_gas: False if the loss already contains the 1 / accumulation steps.

        Raises:
            EngineArgumentError: `loss` is not a single number that can be differentiated.
        """
        parts = self._living()
        _check_loss(loss)
        weight, divisor = parts.watch.batches.weight(), self._divisor(scale_wrt_gas)
        self._losses.add(loss.detach() / divisor)
        boundary = parts.accumulation.is_boundary()
        parts.accumulation.note_backward()
        self._begin_backward(boundary=boundary)
        if boundary:
            parts.update.stepper.before_last_backward()
        for hook in parts.watch.hooks:
            hook.before_backward(loss, boundary)
        scaled = self._scaled(loss, divisor, weight)
        parts.backwards.watch(scaled)
        return scaled

    def _begin_backward(self, *, boundary: bool) -> None:
        """Called before a backward, of a loss or of gradients from another stage; `boundary`: it is the last one of its
        update.
        """
        self._parts.window.before_backward(boundary=boundary)

    def _scaled(self, loss: torch.Tensor, divisor: int, weight: float = 1.0) -> torch.Tensor:
        """`loss * loss_scale * weight / divisor` in fp32, and nothing else."""
        return loss.float() * (self._parts.update.scaler.scale * weight / divisor)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Accumulate the gradients of a micro-batch's loss, and reduce them over the ranks when that is due.

        Args:
            loss: as for `scale`.
            retain_graph: keep the graph for another backward through it.
            scale_wrt_gas: divide by the accumulation steps.

        Returns:
            The unscaled loss divided by the accumulation steps (detached).
        """
        scaled = self.scale(loss, scale_wrt_gas)
        with self._parts.watch.clock.range("backward"):
            scaled.backward(retain_graph=retain_graph)
        return loss.detach() / self._divisor(scale_wrt_gas)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End the micro-batch; at an accumulation boundary update the parameters.

        Args:
            lr_kwargs: passed to the learning-rate scheduler's `step` if the update is applied.
        """
        parts = self._living()
        parts.window.before_step()
        boundary = parts.accumulation.is_boundary()
        self._applied = False
        if boundary:
            self._update(lr_kwargs or {})
        self.counters.micro_steps += parts.accumulation.advance()
        if boundary:
            self._after_update()

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        self._before_update()
        self._end_update(self._apply_update(lr_kwargs))

    def _before_update(self) -> None:
        """Called when all gradients of the update have arrived. Nothing has been changed yet."""
        for hook in self._parts.watch.hooks:
            hook.before_update()

    def _apply_update(self, lr_kwargs: dict[str, Any]) -> StepReport:
        """Step the optimizer and the schedule, and count."""
        parts, counters = self._parts, self.counters
        scale = parts.update.scaler.scale
        with parts.watch.batches.rates():
            lr = tuple(learning_rates(parts.shards.param_groups))
            with parts.watch.clock.range("step"):
                outcome = parts.update.stepper.step()
        samples = parts.watch.batches.samples(self.train_batch_size())
        self._applied = not outcome.overflow
        if self._applied:
            parts.update.schedule.step(**lr_kwargs)
        counters.skipped_steps += int(outcome.overflow)
        counters.global_steps += 1
        counters.global_samples += samples
        return StepReport(
            global_step=counters.global_steps,
            global_samples=counters.global_samples,
            samples=samples,
            applied=self._applied,
            lr=lr,
            loss_scale=scale,
            outcome=outcome,
            loss_tensor=self._losses.take(),
        )

    def _end_update(self, report: StepReport) -> None:
        """Tell the observers."""
        self.last_step = report
        for observer in self._parts.watch.observers:
            observer.after_step(report)

    def _after_update(self) -> None:
        """Called when an update is over. Here the ranks stop together, if they have agreed to."""
        if self._companions or self._preemption is not None:
            self._tell_companions()
        self._parts.gate.end_update()

    def _divisor(self, scale_wrt_gas: bool) -> int:
        return self._parts.accumulation.steps if scale_wrt_gas else 1

    # - Gradient accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming `step()` updates the parameters."""
        return self._parts.accumulation.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set by hand whether the running micro-batch is the last one, until the next call (None: count again)."""
        self._living().accumulation.override(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside the context only accumulate local gradients. Allowed in every ZeRO stage; `step()` inside is
        an error.

        In stages 2 and 3 this keeps full local gradients until the next backward outside of the context.
        """
        return self._living().window.hold()

    def train_batch_size(self) -> int:
        """Samples per update over all data-parallel ranks."""
        return self.train_micro_batch_size_per_gpu() * self._parts.accumulation.steps * self._parts.topology.batches[1]

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank in one forward and backward."""
        return self._custom_batch or self._parts.loader.micro_batch_size

    def get_batch_info(self) -> BatchInfo:
        """All three batch sizes."""
        return BatchInfo(
            self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()
        )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size from the next update on, by changing the accumulation steps.

        Raises:
            EngineArgumentError: it is not a multiple of micro batch size times data-parallel ranks.
        """
        parts = self._living()
        per_micro_step = self.train_micro_batch_size_per_gpu() * parts.topology.batches[1]
        if train_batch_size <= 0 or train_batch_size % per_micro_step:
            raise EngineArgumentError(
                f"set_train_batch_size: got {train_batch_size}, expected a positive multiple of {per_micro_step} "
                f"(micro batch {self.train_micro_batch_size_per_gpu()} x {parts.topology.batches[1]} ranks)"
            )
        parts.accumulation.steps = train_batch_size // per_micro_step
        parts.shards.control.follow_backward(parts.backwards)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Tell the engine that micro-batches have another size from the next update on. The global size changes with
        it.

        This changes only the counting of samples: the loader keeps the size it was built with.

        Args:
            micro_batch_size: samples per rank and forward pass.

        Raises:
            EngineArgumentError: a number below 1.
            EngineError: in the middle of an update.
        """
        if micro_batch_size <= 0:
            raise EngineArgumentError(f"set_train_micro_batch_size: got {micro_batch_size}, expected a positive number")
        self._living().accumulation.steps = self._parts.accumulation.steps  # refuses in the middle of an update
        self._custom_batch = micro_batch_size

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients accumulated so far."""
        parts = self._living()
        if parts.optimizer is None:
            parts.module.zero_grad(set_to_none=set_to_none)
        else:
            parts.optimizer.zero_grad(set_to_none=set_to_none)

    def forget_micro_batches(self) -> None:
        """Restart the current update: drop gradients, losses and the count of micro-batches since the last update."""
        parts = self._living()
        parts.window.close()
        parts.gate.abandon_update()
        parts.accumulation.restart()
        self._losses.take()
        parts.watch.batches.forget()
        self.zero_grad()

    # - Data

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> TrainingLoader:
        """A loader of this rank's share of `dataset`, in micro-batches; see `dsx.data.TrainingLoader`.

        Args:
            batch_size: samples per micro-batch and rank; None: the configured micro-batch size.
            route: "train" shuffles, with another order in each epoch; "eval" and "predict" keep the dataset's order.
            pin_memory: hand out page-locked tensors where the device is a CUDA device.
            data_sampler: use this order instead; it must contain this rank's share only.
            collate_fn: makes a batch of a list of samples; None: torch's.
            num_local_io_workers: number of worker processes that read; None or 0: this process reads.

        Raises:
            EngineArgumentError: another route.
        """
        if route not in _ROUTES:
            raise EngineArgumentError(f"deepspeed_io(route=...): got {route!r}, expected one of {', '.join(_ROUTES)}")
        base = self._living().loader
        options = dataclasses.replace(
            base,
            micro_batch_size=self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            shuffle=route == "train",
            pin_memory=pin_memory,
            num_workers=num_local_io_workers or 0,
            collate_fn=collate_fn or base.collate_fn,
            sampler=data_sampler,
        )
        trains = route == "train" and data_sampler is None
        loader = TrainingLoader(dataset, self._parts.watch.loader_rule(dataset, options) if trains else options)
        if trains:
            loader.on_batch = self._parts.watch.batches.note
        return loader

    # - Life

    def destroy(self) -> None:
        """Remove every hook from the module and release all state; the engine cannot be used afterwards.

        The states of the optimizer are freed here. Parameters and their gradients are freed with the last reference to
        the module and to what `dsx.initialize` returned.

        Raises:
            dsx.checkpoint.CheckpointError: an asynchronous save has failed.
        """
        if self._alive:
            self._alive = False
            try:
                self._close_checkpoints()
            finally:
                self._parts.window.close()
                self._parts.watch.close()
                self.training_dataloader = None
                # An engine refers to itself in many places, and Python looks for such objects seldom: 80 engines of
                # 300 MB, one after the other, ended a process with 23 GB (test_engine_freed.py).
                gc.collect()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.destroy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EngineError(
            "an engine cannot be copied or pickled: it holds process groups and this rank's shards. Save a checkpoint"
            " with save_checkpoint, or copy the model, engine.module (at ZeRO stage 3 on every rank inside"
            " zero.GatheredParameters(engine.module.parameters()))"
        )

    def _living(self) -> EngineParts:
        if not self._alive:
            raise EngineError("this engine was destroyed; build a new one with dsx.initialize")
        return self._parts


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise EngineArgumentError(
            f"backward(loss): got {type(loss).__name__}, expected a tensor with one element; take the loss out of the"
            " model's output first"
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise EngineArgumentError(
            f"backward(loss): got shape {tuple(loss.shape)} of {loss.dtype}, expected one floating-point number; reduce"
            " it, for example with loss.mean()"
        )
    if not loss.requires_grad:
        raise EngineArgumentError(
            "backward(loss): the loss does not depend on any trainable parameter; was it computed under"
            " torch.no_grad(), or detached?"
        )
