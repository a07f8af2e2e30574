"""Loops that train by themselves: where their micro-batches begin, and the adapter of what they train.

A loop that is called once and trains to its end gives an audit no training step. It does call something once for each
micro-batch, and that call is replaced while the audit runs: it tells of the micro-batch, and then goes on as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_map

from .adapters import TorchSystem, adapter_for
from .errors import AuditError
from .system import System

__all__ = ["LightningLoop", "Loop", "ModelLoop", "TitanLoop", "TrainerLoop", "loop_for"]

Begin = Callable[[Any], None]
End = Callable[[Any], None]


@runtime_checkable
class Loop(Protocol):
    """A loop that owns its training steps."""

    def system(self) -> System:
        """The adapter of what is trained. It is asked for at the first micro-batch, when everything is built."""
        ...

    def passes(self, begin: Begin, end: End) -> contextlib.AbstractContextManager[None]:
        """While it is entered, call `begin(batch)` before each forward pass of training, outside of every wrapper, and
        `end(loss)` when its loss is known; a loop that does not tell its losses never calls `end`.
        """
        ...


class TrainerLoop:
    """`train()` of transformers' Trainer. A micro-batch is what `compute_loss` gets: the dict of inputs with labels.

    Args:
        trainer: the Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def system(self) -> System:
        """See `Loop`."""
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        return adapter_for(self.trainer.model_wrapped, self.trainer.optimizer, scaler)

    @contextlib.contextmanager
    def passes(self, begin: Begin, end: End) -> Iterator[None]:
        """Around `compute_loss`, which evaluation calls too."""
        right = self.trainer.compute_loss

        def compute_loss(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not model.training:
                return right(model, inputs, *args, **kwargs)
            begin(copied(inputs))
            found = right(model, inputs, *args, **kwargs)
            end(found[0] if isinstance(found, tuple) else found)
            return found

        with mock.patch.object(self.trainer, "compute_loss", compute_loss):
            yield


class LightningLoop:
    """`fit()` of Lightning's Trainer with automatic optimization. A micro-batch is what `training_step` gets; the plain
    model is the LightningModule, and the loss is that of its `training_step`.

    Args:
        module: the LightningModule.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def system(self) -> System:
        """See `Loop`."""
        trainer = self.module.trainer
        if len(trainer.optimizers) != 1:
            raise AuditError(f"optimizers: got {len(trainer.optimizers)} in Lightning's Trainer, expected one")
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return adapter_for(trainer.strategy.model, trainer.optimizers[0], scaler)

    @contextlib.contextmanager
    def passes(self, begin: Begin, end: End) -> Iterator[None]:
        """Passes are seen by the hooks around a micro-batch: `training_step` itself runs inside DDP's or FSDP's
        forward.
        """
        started, ended = self.module.on_train_batch_start, self.module.on_train_batch_end

        def on_train_batch_start(batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = started(batch, *args, **kwargs)
            if result != -1:  # -1 leaves out the rest of the epoch
                begin(copied(batch))
            return result

        def on_train_batch_end(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(outputs, dict) and "loss" in outputs:
                end(outputs["loss"])
            return ended(outputs, *args, **kwargs)

        with (
            mock.patch.object(self.module, "on_train_batch_start", on_train_batch_start),
            mock.patch.object(self.module, "on_train_batch_end", on_train_batch_end),
        ):
            yield


class TitanLoop:
    """`train()` or `train_step()` of torchtitan's Trainer without pipelines. A micro-batch is (inputs, labels): a dict
    of tensors and a tensor.

    Args:
        trainer: the Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def system(self) -> System:
        """See `Loop`."""
        parts, optimizers = list(self.trainer.model_parts), list(self.trainer.optimizers)
        if len(parts) != 1 or len(optimizers) != 1:
            raise AuditError(
                f"torchtitan: got {len(parts)} model parts and {len(optimizers)} optimizers, expected one of each:"
                " an audit needs a rank that runs the whole forward"
            )
        return TorchSystem(parts[0], optimizers[0])

    @contextlib.contextmanager
    def passes(self, begin: Begin, end: End) -> Iterator[None]:
        """Around `forward_backward_step`."""
        right = self.trainer.forward_backward_step

        def forward_backward_step(*, input_dict: Any, labels: Any, **kwargs: Any) -> Any:
            begin(copied((input_dict, labels)))
            loss = right(input_dict=input_dict, labels=labels, **kwargs)
            end(loss)
            return loss

        with mock.patch.object(self.trainer, "forward_backward_step", forward_backward_step):
            yield


class ModelLoop:
    """Any loop around a torch model or an engine. A micro-batch is what the forward pass gets: (args, kwargs).

    Args:
        model, optimizer, scaler: as for `audit`.
    """

    def __init__(self, model: Any, optimizer: Any = None, scaler: Any = None) -> None:
        self._found = adapter_for(model, optimizer, scaler)
        self.model: Any = model

    def system(self) -> System:
        """See `Loop`."""
        return self._found

    @contextlib.contextmanager
    def passes(self, begin: Begin, end: End) -> Iterator[None]:
        """Passes are seen by a hook of the outermost module's forward."""
        del end  # a forward may return anything
        outer = self.model if isinstance(self.model, nn.Module) else self._found.module

        def starts(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module.training and torch.is_grad_enabled():
                begin(copied((args, kwargs)))

        hook = outer.register_forward_pre_hook(starts, prepend=True, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


def loop_for(owner: Any, optimizer: Any = None, scaler: Any = None) -> Loop:
    """The loop of an object: a Trainer of transformers or torchtitan, a LightningModule, a model, or a `Loop`.

    Raises:
        AuditError: no loop fits.
    """
    if isinstance(owner, Loop) and not isinstance(owner, nn.Module):
        return owner
    for kind in type(owner).__mro__:
        name = f"{kind.__module__}.{kind.__name__}"
        if kind.__name__ == "Trainer" and name.startswith(("transformers.", "torchtitan.")):
            return TrainerLoop(owner) if name.startswith("transformers.") else TitanLoop(owner)
        if kind.__name__ == "LightningModule":
            return LightningLoop(owner)
        if kind.__name__ == "Trainer" and name.startswith(("lightning.", "pytorch_lightning.")):
            raise AuditError("got Lightning's Trainer, expected the LightningModule that it trains")
    return ModelLoop(owner, optimizer, scaler)


def copied(batch: Any) -> Any:
    """A micro-batch whose tensors the loop cannot change any more, on the host."""
    return tree_map(lambda x: x.detach().to("cpu", copy=True) if isinstance(x, torch.Tensor) else x, _plain(batch))


def _plain(batch: Any) -> Any:
    """Mappings of other classes (`BatchEncoding`) as dicts: an audit sends them between ranks."""
    if hasattr(batch, "keys") and hasattr(batch, "__getitem__"):
        return {key: _plain(batch[key]) for key in batch.keys()}  # noqa: SIM118 - not every mapping iterates its keys
    return batch
