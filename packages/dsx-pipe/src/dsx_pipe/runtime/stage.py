"""One stage on one rank: forward and backward of single micro-batches, and what is kept between the two."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import PipelineError
from .backward import DeferredWeights, input_backward, whole_backward
from .structure import TensorSpec, describe, flatten, unflatten


@dataclass(frozen=True)
class StageCallbacks:
    """Where an engine takes part in a step. Each is optional.

    Attributes:
        forward: (stage, micro_batch, module, value) -> output; runs the module in place of `module(value)`.
        scale_loss: what is differentiated in place of loss / micro_batches.
        before_backward: (stage, micro_batch, last); `last` is True for the stage's last backward of the step.
        after_backward: the same arguments, behind each backward (with a split one behind the weight part).
    """

    forward: Callable[[int, int, Any, Any], Any] | None = None
    scale_loss: Callable[[torch.Tensor], torch.Tensor] | None = None
    before_backward: Callable[[int, int, bool], None] | None = None
    after_backward: Callable[[int, int, bool], None] | None = None


class NonFiniteLoss(PipelineError):
    """A micro-batch's loss is not finite."""


@dataclass
class _Kept:
    """What a micro-batch leaves between forward and backward."""

    value: Any  # the input, with leaves that collect gradients
    leaves: list[torch.Tensor]
    outputs: list[torch.Tensor]
    deferred: DeferredWeights | None = None


@dataclass
class Stage:
    """A stage of the model.

    Attributes:
        index: which stage.
        module: what computes its output from its input, a single argument.
        is_last: whether the loss is computed here.
        loss_fn: (output, labels) -> scalar; None if the output is the loss.
        callbacks: of an engine.
        stop_at_nonfinite: raise NonFiniteLoss when a loss is not finite.
        split: whether an input backward leaves the weights for later; if not it does all of it.
        extra_losses: gives further losses of the micro-batch whose loss was just computed, by name.
    """

    index: int
    module: Any
    is_last: bool
    loss_fn: Callable[..., torch.Tensor] | None
    callbacks: StageCallbacks
    stop_at_nonfinite: bool = True
    split: bool = True
    extra_losses: Callable[[], dict[str, torch.Tensor] | None] | None = None
    kept: dict[int, _Kept] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    extras: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    most_kept: int = 0

    def begin(self) -> None:
        """A step begins: nothing is kept from the one before."""
        self.kept.clear()
        self.losses.clear()
        self.extras.clear()
        self.outputs.clear()
        self.most_kept = 0

    def forward(
        self, micro_batch: int, value: Any, labels: Any, parts: int, *, train: bool, loss: bool, keep_output: bool
    ) -> Any:
        """Output for the next stage (None on the last one).

        Args:
            micro_batch: index.
            value: input, from the data or from the previous stage.
            labels: for the loss, on the last stage.
            parts: number of micro-batches, by which the loss is divided for the backward.
            train: keep what the backward needs.
            loss: compute the loss (last stage).
            keep_output: keep the output itself (last stage).
        """
        if train and not torch.is_grad_enabled():
            raise PipelineError("a training step under torch.no_grad() computes no gradients; use eval_batch")
        with nullcontext() if train else torch.no_grad():
            run = self.callbacks.forward
            output = self.module(value) if run is None else run(self.index, micro_batch, self.module, value)
            outputs = output
            if self.is_last:
                if keep_output:
                    self.outputs[micro_batch] = output
                if loss:
                    outputs = self._loss(micro_batch, output, labels, parts)
        if train:
            leaves = [t for t in flatten(value)[1] if t.requires_grad and t.is_leaf]
            self.kept[micro_batch] = _Kept(value, leaves, flatten(outputs)[1])
            self.most_kept = max(self.most_kept, len(self.kept))
        if self.is_last and train and self.stop_at_nonfinite and not math.isfinite(float(self.losses[micro_batch])):
            raise NonFiniteLoss(f"the loss is {float(self.losses[micro_batch])}")
        return None if self.is_last else output

    def _loss(self, micro_batch: int, output: Any, labels: Any, parts: int) -> torch.Tensor:
        loss = output if self.loss_fn is None else self.loss_fn(output, labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise PipelineError(
                f"the loss is {describe(loss)}, expected a tensor with one element; "
                + ("pass loss_fn=..." if self.loss_fn is None else "let loss_fn reduce it, with .mean() for example")
            )
        self.losses[micro_batch] = loss.detach()
        found = self.extra_losses() if self.extra_losses is not None else None
        for name, value in (found or {}).items():
            self.extras.setdefault(name, []).append(value.detach())
        scaled = loss / parts if self.callbacks.scale_loss is None else self.callbacks.scale_loss(loss)
        return scaled.reshape(())

    def backward(self, micro_batch: int, grads: list[torch.Tensor | None], *, whole: bool, last: bool) -> list[Any]:
        """Gradients of the input's leaves, None for a leaf that was not used.

        Args:
            micro_batch: index.
            grads: gradient of every output that carries one; [] on the last stage.
            whole: with the parameters' gradients; if not, `weight` has to follow.
            last: this is the stage's last backward of the step.
        """
        kept = self.kept[micro_batch]
        self._tell(self.callbacks.before_backward, micro_batch, last)
        outputs, filled = kept.outputs, self._filled(kept, grads)
        if whole or not self.split:
            whole_backward(outputs, filled)
            kept.deferred = DeferredWeights()
        else:
            kept.deferred = input_backward(outputs, filled, kept.leaves)
        kept.outputs = []
        found = [leaf.grad for leaf in kept.leaves]
        if whole:
            del self.kept[micro_batch]
            self._tell(self.callbacks.after_backward, micro_batch, last)
        return found

    def weight(self, micro_batch: int, *, last: bool) -> None:
        """The parameters' gradients that `backward(whole=False)` has left."""
        kept = self.kept[micro_batch]
        if kept.deferred is None:
            raise PipelineError(
                f"stage {self.index}: weight backward of micro-batch {micro_batch} before its input part"
            )
        kept.deferred.run()
        del self.kept[micro_batch]
        self._tell(self.callbacks.after_backward, micro_batch, last)

    def _filled(self, kept: _Kept, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """One gradient (or None) per output tensor; only those that need one came from the next stage."""
        if self.is_last:
            return [None] * len(kept.outputs)
        waiting = iter(grads)
        return [next(waiting, None) if TensorSpec.of(o).requires_grad else None for o in kept.outputs]

    def _tell(self, callback: Callable[[int, int, bool], None] | None, micro_batch: int, last: bool) -> None:
        if callback is not None:
            callback(self.index, micro_batch, last)

    def where_nonfinite(self, micro_batch: int) -> tuple[str, str | None] | None:
        """(what is not finite, layer) if values of a kept micro-batch stop being finite on this stage, else None.

        The stage runs once more on the input it has kept, with a check behind every layer.
        """
        kept = self.kept.get(micro_batch)
        if kept is None:
            return None
        if not _finite(kept.value):
            return ("its input, from the data,", None) if self.index == 0 else None
        found: list[str] = []
        handles = []
        if isinstance(self.module, nn.Module):
            parts = [(name, part) for name, part in self.module.named_modules() if name]
            handles = [part.register_forward_hook(_watch(name, found)) for name, part in parts]
        try:
            with torch.no_grad():
                output = self.module(kept.value)
        finally:
            for handle in handles:
                handle.remove()
        if not found and not self.is_last and _finite(output):
            return None
        return "its values", found[0] if found else None


def _watch(name: str, found: list[str]) -> Callable[..., None]:
    def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
        if not found and not _finite(output):
            found.append(f"{name} ({type(module).__name__})")

    return hook


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in flatten(value)[1] if t.is_floating_point() or t.is_complex())


def as_input(value: Any) -> Any:
    """The output of a stage on the same rank as an input: same memory, new leaves."""
    structure, tensors, others = flatten(value)
    leaves = [t.detach().requires_grad_(TensorSpec.of(t).requires_grad) for t in tensors]
    return unflatten(structure, leaves, others)
