"""One stage on one rank: forward and backward of single micro-batches, and the values kept between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import PipelineError
from .backward import DeferredWeights, input_backward, whole_backward
from .nonfinite import (
    finite_parameters,
    first_in_backward,
    first_in_forward,
    is_finite,
    layer_of_parameter,
    read_together,
)
from .structure import TensorSpec, describe, flatten, unflatten


@dataclass(frozen=True)
class StageCallbacks:
    """Functions that an engine runs within a step. Each is optional.

    Attributes:
        forward: (stage, micro_batch, module, value) -> output; called instead of `module(value)`.
        scale_loss: loss -> the scalar that is differentiated instead of loss / micro_batches.
        before_backward: (stage, micro_batch, last), called before each backward; `last` is True for the stage's last
            backward of the step.
        after_backward: (stage, micro_batch, last), called after each backward; after the weight part of a split one.
    """

    forward: Callable[[int, int, Any, Any], Any] | None = None
    scale_loss: Callable[[torch.Tensor], torch.Tensor] | None = None
    before_backward: Callable[[int, int, bool], None] | None = None
    after_backward: Callable[[int, int, bool], None] | None = None


class NonFiniteLoss(PipelineError):
    """A micro-batch's loss is not finite."""

    def __init__(self, text: str, micro_batch: int) -> None:
        super().__init__(text)
        self.micro_batch = micro_batch


class NonFiniteGradient(PipelineError):
    """Gradients stop being finite in this stage; `layer` says where, if it could be found."""

    def __init__(self, text: str, layer: str | None, micro_batch: int | None) -> None:
        super().__init__(text)
        self.layer, self.micro_batch = layer, micro_batch


@dataclass
class _Kept:
    """The state of a micro-batch between its forward and its backward."""

    value: Any  # the input, whose tensors are leaves of autograd's graph
    leaves: list[torch.Tensor]
    outputs: list[torch.Tensor]
    labels: Any
    grads: list[torch.Tensor | None] = field(default_factory=list)
    deferred: DeferredWeights | None = None


@dataclass
class Stage:
    """A stage of the model.

    Attributes:
        index: index of the stage.
        module: computes the stage's output from its input, which is a single argument.
        is_last: whether the loss is computed here.
        loss_fn: (output, labels) -> scalar; None if the output is the loss.
        callbacks: functions of an engine.
        stop_at_nonfinite: raise NonFiniteLoss when a loss is not finite, NonFiniteGradient when a gradient is not.
        may_rerun: whether the stage may run once more to find the layer.
        split: whether an input backward leaves the parameters' gradients for later; False: it computes all gradients.
        extra_losses: returns further losses, by name, of the micro-batch whose loss was just computed.
        kept: micro-batch -> what is kept of it until its backward has ended.
        losses: micro-batch -> its loss, detached (last stage).
        extras: name -> further losses of the micro-batches (last stage).
        outputs: micro-batch -> its output, if outputs are kept (last stage).
        most_kept: largest number of micro-batches in `kept` at one time in this step.
    """

    index: int
    module: Any
    is_last: bool
    loss_fn: Callable[..., torch.Tensor] | None
    callbacks: StageCallbacks
    stop_at_nonfinite: bool = True
    split: bool = True
    extra_losses: Callable[[], dict[str, torch.Tensor] | None] | None = None
    may_rerun: bool = True
    kept: dict[int, _Kept] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    extras: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    most_kept: int = 0
    _nonfinite_flags: dict[int, torch.Tensor] = field(default_factory=dict)  # micro-batch -> 0-D bool
    _losses_read: torch.Tensor | None = None  # all losses of this step, if they were read from the device
    _first_layer: str | None = None  # of a stage whose input has no gradient: the layer whose forward ends first

    def begin(self) -> None:
        """Begin a step: drop everything of the previous one."""
        self.kept.clear()
        self.losses.clear()
        self.extras.clear()
        self.outputs.clear()
        self._nonfinite_flags.clear()
        self._losses_read = None
        self.most_kept = 0

    def forward(
        self, micro_batch: int, value: Any, labels: Any, parts: int, *, train: bool, loss: bool, keep_output: bool
    ) -> Any:
        """Run the forward of a micro-batch. Return the output for the next stage; None on the last stage.

        Args:
            micro_batch: index of the micro-batch.
            value: input, from the data or from the previous stage.
            labels: labels for the loss, on the last stage.
            parts: number of micro-batches, by which the loss is divided for the backward.
            train: keep what the backward needs.
            loss: compute the loss (last stage).
            keep_output: keep the output itself (last stage).

        Raises:
            PipelineError: it trains under `torch.no_grad()`, or the loss is not a tensor with one element.
            NonFiniteLoss: the loss is not finite and `stop_at_nonfinite` is set.
        """
        if train and not torch.is_grad_enabled():
            raise PipelineError("a training step under torch.no_grad() computes no gradients; use eval_batch")
        leaves = [t for t in flatten(value)[1] if t.requires_grad and t.is_leaf]
        watches_first_layer = train and self.stop_at_nonfinite and not leaves
        with nullcontext() if train else torch.no_grad():
            with self._watch_first_layer(micro_batch) if watches_first_layer else nullcontext():
                output = self._run(micro_batch, value)
            outputs = output
            if self.is_last:
                if keep_output:
                    self.outputs[micro_batch] = output
                if loss:
                    outputs = self._loss(micro_batch, output, labels, parts)
        if train:
            self.kept[micro_batch] = _Kept(value, leaves, flatten(outputs)[1], labels)
            self.most_kept = max(self.most_kept, len(self.kept))
        if self.is_last and train and self.stop_at_nonfinite and self.losses[micro_batch].device.type == "cpu":
            # On a device they are checked with the last backward: the host would wait here.
            self._check_losses([micro_batch], [float(self.losses[micro_batch])])
        return None if self.is_last else output

    def _run(self, micro_batch: int, value: Any) -> Any:
        run = self.callbacks.forward
        return self.module(value) if run is None else run(self.index, micro_batch, self.module, value)

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
        """Run the backward of a micro-batch. Return the gradients of the input's leaves; None for an unused leaf.

        Args:
            micro_batch: index of the micro-batch.
            grads: gradient of every output that requires one; [] on the last stage.
            whole: also compute the parameters' gradients; False: `weight` is called for them later.
            last: whether this is the stage's last backward of the step.

        Raises:
            NonFiniteGradient: a gradient is not finite and `stop_at_nonfinite` is set.
        """
        kept = self.kept[micro_batch]
        self._call_back(self.callbacks.before_backward, micro_batch, last)
        outputs, filled = kept.outputs, self._gradient_per_output(kept, grads)
        if whole or not self.split:
            whole_backward(outputs, filled)
            kept.deferred = DeferredWeights()
        else:
            kept.deferred = input_backward(outputs, filled, kept.leaves)
        kept.outputs = []
        found = [leaf.grad for leaf in kept.leaves]
        if self.stop_at_nonfinite:
            kept.grads = filled
            self._record_nonfinite(found, micro_batch)
            self._raise_if_nonfinite(micro_batch, last=last and whole)
            kept.grads = [] if kept.leaves else filled  # without leaves the weight part still has to be checked
        if whole:
            del self.kept[micro_batch]
            self._call_back(self.callbacks.after_backward, micro_batch, last)
        return found

    def weight(self, micro_batch: int, *, last: bool) -> None:
        """Compute the parameters' gradients that `backward(whole=False)` has deferred."""
        kept = self.kept[micro_batch]
        if kept.deferred is None:
            raise PipelineError(
                f"stage {self.index}: weight backward of micro-batch {micro_batch} before its input part"
            )
        kept.deferred.run()
        if self.stop_at_nonfinite:
            self._raise_if_nonfinite(micro_batch, last=last)
        del self.kept[micro_batch]
        self._call_back(self.callbacks.after_backward, micro_batch, last)

    def _gradient_per_output(self, kept: _Kept, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """One gradient or None per output tensor. The next stage sends gradients only of outputs that require one."""
        if self.is_last:
            return [None] * len(kept.outputs)
        waiting = iter(grads)
        return [next(waiting, None) if TensorSpec.of(o).requires_grad else None for o in kept.outputs]

    def _call_back(self, callback: Callable[[int, int, bool], None] | None, micro_batch: int, last: bool) -> None:
        if callback is not None:
            callback(self.index, micro_batch, last)

    def losses_on_host(self, count: int) -> torch.Tensor:
        """The losses of the first `count` micro-batches, float64 in host memory. Waits once for the device,
        unless they were read before."""
        if self._losses_read is not None:
            return self._losses_read
        return _row([self.losses[m] for m in range(count)]).double().cpu()

    # - values that are not finite

    def where_nonfinite(self, micro_batch: int) -> tuple[str, str | None] | None:
        """(what is not finite, layer) if the values of a kept micro-batch stop being finite on this stage, else None.

        The stage runs once more on the input that it has kept, with a check after every layer.
        """
        kept = self.kept.get(micro_batch)
        if kept is None:
            return None
        if not is_finite(kept.value):
            return ("values of its input, from the data,", None) if self.index == 0 else None
        if not self.may_rerun:
            return None
        finite, layer = first_in_forward(self.module, lambda: self._run(micro_batch, kept.value))
        return None if finite and not self.is_last else ("its values", layer)

    def _layers_to_watch(self) -> dict[str, nn.Module]:
        """The layer whose forward ended first for the last micro-batch; all layers if that is not known."""
        if not isinstance(self.module, nn.Module):
            return {}
        if self._first_layer is not None:
            try:
                return {self._first_layer: self.module.get_submodule(self._first_layer)}
            except AttributeError:  # the stage has other layers now
                pass
        return dict(self.module.named_modules())

    @contextmanager
    def _watch_first_layer(self, micro_batch: int) -> Iterator[None]:
        """Check the gradient of the first layer's output, if the stage's input has no gradient to check."""
        entry = self._layers_to_watch()
        seen: list[str] = []

        def watch(name: str | None) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                tensors = [t for t in flatten(output)[1] if t.requires_grad]
                if tensors and not seen:
                    seen.append(name or "")
                    for tensor in tensors:
                        tensor.register_hook(lambda gradient: self._record_nonfinite([gradient], micro_batch))

            return hook

        handles = [part.register_forward_hook(watch(name)) for name, part in entry.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._first_layer = seen[0] if seen else None

    def _record_nonfinite(self, grads: Sequence[torch.Tensor | None], micro_batch: int) -> None:
        """Record whether gradients are finite, without waiting for the device."""
        for gradient in grads:
            if gradient is not None:
                flag = torch.isfinite(gradient).all().logical_not()
                known = self._nonfinite_flags.get(micro_batch)
                self._nonfinite_flags[micro_batch] = flag if known is None else known | flag

    def _check_losses(self, micro_batches: Sequence[int], losses: Sequence[float]) -> None:
        """Raise `NonFiniteLoss` for the first loss that is not finite."""
        for index, loss in zip(micro_batches, losses):
            if not math.isfinite(loss):
                raise NonFiniteLoss(f"the loss is {loss}", index)

    def _raise_if_nonfinite(self, micro_batch: int, *, last: bool) -> None:
        """Raise `NonFiniteGradient` if a recorded gradient is not finite, with the `last` part of the stage's backwards
        also if that of a parameter is not, added up over the micro-batches.

        On the host this is checked at once. Reading numbers of a device waits for it, so there all are read together,
        with the last part.
        """
        watched = [*self._nonfinite_flags.values(), *self.losses.values()]
        on_host = all(tensor.device.type == "cpu" for tensor in watched)
        if not on_host and not last:
            return
        flags = dict(sorted(self._nonfinite_flags.items()))
        losses = [] if on_host else sorted(self.losses)  # on the host each was checked with its forward
        if last:
            names, finite = finite_parameters(self.module)
            read = read_together([_row(list(flags.values())), _row([self.losses[m] for m in losses]), finite])
        else:
            names, read = [], [[flag.item() for flag in flags.values()], [], []]
        if losses:
            self._losses_read = torch.tensor(read[1], dtype=torch.float64, device="cpu")
            self._check_losses(losses, read[1])
        for index, is_bad in zip(flags, read[0]):
            if is_bad:
                raise NonFiniteGradient(
                    "gradients stop being finite here: its backward received finite ones and computed others",
                    self._layer_of_backward(index),
                    index,
                )  # fmt: skip
        self._nonfinite_flags.clear()
        if bad := [name for name, is_finite_now in zip(names, read[2]) if not is_finite_now]:
            raise NonFiniteGradient(
                f"the gradient of {bad[-1]} is not finite, added up over the micro-batches",
                layer_of_parameter(self.module, bad[-1]), None,
            )  # fmt: skip

    def _layer_of_backward(self, micro_batch: int) -> str | None:
        kept = self.kept.get(micro_batch)
        if kept is None or not self.may_rerun:
            return None

        def forward_again() -> list[torch.Tensor]:
            output = self._run(micro_batch, kept.value)
            if self.is_last and self.loss_fn is not None:
                output = self.loss_fn(output, kept.labels)
            return flatten(output)[1]

        try:
            return first_in_backward(self.module, forward_again, kept.grads)
        except Exception:  # noqa: BLE001  (the search must not hide the failure that it explains)
            return None


def _row(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one element as one 1-D tensor."""
    return torch.stack([t.reshape(()) for t in scalars]) if scalars else torch.empty(0, device="cpu")


def as_input(value: Any) -> Any:
    """The output of a stage as the input of the next stage on the same rank: the same memory, as new leaves."""
    structure, tensors, others = flatten(value)
    leaves = [t.detach().requires_grad_(TensorSpec.of(t).requires_grad) for t in tensors]
    return unflatten(structure, leaves, others)
