"""Adapters: whole parameters and gradients of known training systems, read through their public calls.

`TorchSystem` serves every system that calls a torch optimizer: plain loops, DDP, FSDP2, tensor parallelism by DTensor,
Accelerate, transformers' Trainer, Lightning and torchtitan. `Fsdp1System` gathers flat parameters. `EngineSystem` is
for engines with DeepSpeed's functions. `adapter_for` chooses by the model's class.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from .errors import AuditError
from .system import Point, System, named, plain_name, whole

__all__ = ["EngineSystem", "Fsdp1System", "MegatronSystem", "TorchSystem", "adapter_for"]


class TorchSystem:
    """A model, wrapped or not, whose gradients are in `p.grad` when a torch optimizer steps.

    Args:
        model: the model as it is called in training.
        optimizer: the torch optimizer, or an object that holds one as `optimizer`.
        scaler: a `GradScaler`, where one is used.
    """

    clipped = True

    def __init__(self, model: nn.Module, optimizer: Any, scaler: Any = None) -> None:
        self.model, self.scaler = model, scaler
        self.optimizer: torch.optim.Optimizer = _inner_optimizer(optimizer)
        forward = model._forward_module if type(model).__name__ == "_FabricModule" else model
        ddp = isinstance(forward, nn.parallel.DistributedDataParallel)
        self.module: nn.Module = forward.module if ddp else forward  # type: ignore[assignment]
        self.buffers_of_rank_0 = ddp and bool(forward.broadcast_buffers)

    @contextlib.contextmanager
    def watch(self, point: Point) -> Iterator[None]:
        """Hooks on the optimizer, and on torch's functions that clip."""
        before = self.optimizer.register_step_pre_hook(partial(_before, point))
        after = self.optimizer.register_step_post_hook(lambda *_: point("after"))
        with contextlib.ExitStack() as stack:
            for place in (torch.nn.utils, torch.nn.utils.clip_grad):
                for name in {"clip_grad_norm_", "clip_grads_with_norm_"} & set(dir(place)):
                    stack.enter_context(mock.patch.object(place, name, _noticed(getattr(place, name), point)))
            try:
                yield
            finally:
                before.remove()
                after.remove()

    def parameters(self) -> dict[str, torch.Tensor]:
        """See `System`."""
        return named(self.module.named_parameters())

    def gradients(self) -> dict[str, torch.Tensor]:
        """See `System`."""
        return named(((name, p.grad) for name, p in self.module.named_parameters()))

    def buffers(self) -> dict[str, torch.Tensor]:
        """See `System`."""
        return named(self.module.named_buffers())

    def learning_rates(self) -> list[float]:
        """See `System`."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def loss_scale(self) -> float:
        """See `System`."""
        return float(self.scaler.get_scale()) if self.scaler is not None and self.scaler.is_enabled() else 1.0

    def scaler_state(self) -> dict[str, float]:
        """See `System`."""
        return {} if self.scaler is None or not self.scaler.is_enabled() else self.scaler.state_dict()

    def states(self) -> dict[str, torch.Tensor]:
        """See `System`."""
        found = {}
        for name, parameter in self.module.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                local = getattr(value, "to_local", lambda value=value: value)()
                if isinstance(local, torch.Tensor):
                    found[f"state {key} of {plain_name(name)}"] = local.detach().to("cpu", copy=True)
        return found

    def save(self, folder: str) -> None:
        """See `System`. How a torch program saves is its own affair: give `save` and `load` to the audit."""
        raise NotImplementedError

    load = save


class Fsdp1System(TorchSystem):
    """A `FullyShardedDataParallel` model with `use_orig_params=True`."""

    def _summoned(self, *, grads: bool) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel

        try:
            return FullyShardedDataParallel.summon_full_params(self.model, writeback=False, with_grads=grads)
        except AssertionError as error:
            raise AuditError(f"gradients of FSDP need use_orig_params=True: {error}") from error

    def parameters(self) -> dict[str, torch.Tensor]:
        """See `System`."""
        with self._summoned(grads=False):
            return super().parameters()

    def gradients(self) -> dict[str, torch.Tensor]:
        """See `System`."""
        with self._summoned(grads=True):
            return super().gradients()


class EngineSystem:
    """An engine that owns module and optimizer, and has functions for whole tensors: DeepSpeed, and what follows it.

    Args:
        engine: has `step()`, `module`, `is_gradient_accumulation_boundary()` and `get_lr()`.
        full_parameter, full_gradient: (parameter) -> the whole fp32 tensor on every rank. Collective.
    """

    clipped = False
    buffers_of_rank_0 = False

    def __init__(self, engine: Any, full_parameter: Callable[[Any], Any], full_gradient: Callable[[Any], Any]) -> None:
        self.engine, self.module = engine, engine.module
        self._parameter, self._gradient = full_parameter, full_gradient

    @contextlib.contextmanager
    def watch(self, point: Point) -> Iterator[None]:
        """Around `engine.step()`, where it is at the end of an accumulation."""
        right = self.engine.step

        def step(*args: Any, **kwargs: Any) -> Any:
            if not self.engine.is_gradient_accumulation_boundary():
                return right(*args, **kwargs)
            point("before")
            result = right(*args, **kwargs)
            if not self.skipped():
                point("after")
            return result

        with mock.patch.object(self.engine, "step", step):
            yield

    def skipped(self) -> bool:
        """Whether the last update was left out, after an overflow. Engines that do not tell: no."""
        return False

    def parameters(self) -> dict[str, torch.Tensor]:
        """See `System`."""
        found = {}
        for name, parameter in self.module.named_parameters():
            value = self._parameter(parameter) if parameter.requires_grad else None
            found[plain_name(name)] = whole(parameter if value is None else value)
        return found

    def gradients(self) -> dict[str, torch.Tensor]:
        """See `System`."""
        trained = ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)
        return named((name, self._gradient(p)) for name, p in trained)

    def buffers(self) -> dict[str, torch.Tensor]:
        """See `System`."""
        return named(self.module.named_buffers())

    def learning_rates(self) -> list[float]:
        """See `System`."""
        return [float(rate) for rate in self.engine.get_lr()]

    def loss_scale(self) -> float:
        """See `System`. The functions for gradients remove the scale."""
        return 1.0

    def save(self, folder: str) -> None:
        """See `System`."""
        self.engine.save_checkpoint(folder, tag="audit")

    def load(self, folder: str) -> None:
        """See `System`."""
        self.engine.load_checkpoint(folder, tag="audit")


class MegatronSystem(TorchSystem):
    """Model and optimizer with the attributes of Megatron's: gradients are summed in `p.main_grad`, fp32 parameters are
    `p.main_param`, and `step()` of the optimizer unscales, clips, and returns whether it made the update.

    Args:
        model: the model, or a list of one chunk of it, inside its data-parallel wrapper.
        optimizer: has `step()`, `param_groups`, and `get_loss_scale()` where there is a loss scale. A distributed
            optimizer, whose `main_param` is a slice, is refused.
    """

    clipped = False
    buffers_of_rank_0 = False

    def __init__(self, model: Any, optimizer: Any) -> None:
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        if len(chunks) != 1:
            raise AuditError(f"model: got {len(chunks)} chunks of an interleaved pipeline, expected one")
        self.model, self.scaler, self.optimizer = chunks[0], None, optimizer
        inner: Any = chunks[0]
        while isinstance(getattr(inner, "module", None), nn.Module):  # DDP, Float16Module
            inner = inner.module
        self.module = inner
        for name, parameter in self.module.named_parameters():
            main = getattr(parameter, "main_param", None)
            if main is not None and main.shape != parameter.shape:
                raise AuditError(
                    f"{name}: its main_param has shape {tuple(main.shape)}, expected {tuple(parameter.shape)}: audit"
                    " a run without the distributed optimizer"
                )

    @contextlib.contextmanager
    def watch(self, point: Point) -> Iterator[None]:
        """Around `optimizer.step()`."""
        right = self.optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            point("before")
            result = right(*args, **kwargs)
            if not isinstance(result, tuple) or result[0]:
                point("after")
            return result

        with mock.patch.object(self.optimizer, "step", step):
            yield

    def parameters(self) -> dict[str, torch.Tensor]:
        """See `System`."""
        mains = ((name, getattr(p, "main_param", None)) for name, p in self.module.named_parameters())
        return {**super().parameters(), **named(mains)}

    def gradients(self) -> dict[str, torch.Tensor]:
        """See `System`."""
        scale = self.loss_scale()
        grads = ((n, getattr(p, "main_grad", p.grad)) for n, p in self.module.named_parameters() if p.requires_grad)
        return {name: grad / scale for name, grad in named(grads).items()}

    def loss_scale(self) -> float:
        """See `System`."""
        scale = getattr(self.optimizer, "get_loss_scale", None)
        return 1.0 if scale is None else float(scale())

    def states(self) -> dict[str, torch.Tensor]:
        """See `System`: the states are of parameters inside the optimizer, so none are given."""
        return {}


def adapter_for(model: Any, optimizer: Any = None, scaler: Any = None) -> System:
    """The adapter for a model: what its method `audited()` returns, as dsx's engine has it, or one chosen by its class.

    Raises:
        AuditError: no adapter fits, or an optimizer is missing.
    """
    if callable(getattr(type(model), "audited", None)):
        return model.audited()
    if type(model).__module__.partition(".")[0] == "deepspeed" and "deepspeed" in sys.modules:
        utils = sys.modules["deepspeed"].utils
        return EngineSystem(model, utils.safe_get_full_fp32_param, utils.safe_get_full_grad)
    if not isinstance(model, nn.Module):
        raise AuditError(
            f"no adapter for {type(model).__name__}: expected a torch module or an engine of DeepSpeed or dsx; give"
            " system=<an object with the calls of dsx_verify.System>"
        )
    if optimizer is None:
        raise AuditError("optimizer: got None, expected the torch optimizer that trains the model")
    from torch.distributed.fsdp import FullyShardedDataParallel

    flat = any(isinstance(part, FullyShardedDataParallel) for part in model.modules())
    return (Fsdp1System if flat else TorchSystem)(model, optimizer, scaler)


def _inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside wrappers of Accelerate, Lightning and others."""
    for _ in range(4):
        if type(optimizer).step is not torch.optim.Optimizer.step and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise AuditError(f"optimizer: got {type(optimizer).__name__}, expected a torch optimizer or a wrapper of one")
    return optimizer


def _before(point: Point, _optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before the update. A closure computes gradients inside `step`, as Lightning's do: the point is behind it."""
    given = [
        value for value in (*args, *kwargs.values()) if callable(value) and not isinstance(value, torch.optim.Optimizer)
    ]
    if not given:
        point("before")
        return None

    def closure() -> Any:
        loss = given[0]()
        point("before")
        return loss

    def changed(value: Any) -> Any:
        return closure if value is given[0] else value

    return tuple(map(changed, args)), {key: changed(value) for key, value in kwargs.items()}


def _noticed(function: Callable[..., Any], point: Point) -> Callable[..., Any]:
    def clip(*args: Any, **kwargs: Any) -> Any:
        point("unclipped")
        return function(*args, **kwargs)

    return clip
