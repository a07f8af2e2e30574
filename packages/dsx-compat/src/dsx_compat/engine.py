"""The engine and the optimizer of dsx under DeepSpeed's names.

`entry.initialize` builds dsx's engine and gives it one of these classes. They add names, but no training state: each
method here calls the public method of dsx that does the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from dsx.engine import Engine
from dsx.engine.pipeline import PipelineEngine as DsxPipelineEngine
from dsx_zero import ZeroOptimizer, gather_hooks_paused
from torch import nn

__all__ = ["DeepSpeedEngine", "DeepSpeedOptimizer", "ParameterOffload", "PipelineEngine", "renamed"]


class DeepSpeedEngine(Engine):
    """What `deepspeed.initialize` returns. Everything of `dsx.Engine`, and the names below."""

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as a dictionary: what was given, with the batch sizes completed."""
        return super().config.to_dict()

    # Some programs (Lightning Fabric) step what looks like an optimizer, and the engine's step is the whole one.

    @property
    def optimizer(self) -> Any:
        """The optimizer; at stage 3 without one, the object whose hooks programs take off and put on again."""
        found = super().optimizer
        if found is None and self.zero_optimization_stage() == 3:
            return self.__dict__.setdefault("_parameter_offload", ParameterOffload(self.module))
        return found

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer; empty without one."""
        return self._groups()

    @property
    def defaults(self) -> dict[str, Any]:
        """Those of the optimizer."""
        return getattr(super().optimizer, "defaults", {})

    @property
    def state(self) -> Any:
        """That of the optimizer."""
        return getattr(super().optimizer, "state", {})

    # Whole weights

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` writes at stage 3."""
        return bool(super().config.zero.stage3_gather_16bit_weights_on_model_save)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Whole weights on rank 0, None on the others; every rank must call it."""
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters, rank0_only=True)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict


class PipelineEngine(DsxPipelineEngine, DeepSpeedEngine):
    """The engine of a `PipelineModule`."""


class DeepSpeedOptimizer(ZeroOptimizer):
    """What `deepspeed.initialize` returns as the optimizer."""

    @property
    def parameter_offload(self) -> ParameterOffload:
        """The hooks of stage 3, for programs that take them off for a while (trl).

        Raises:
            AttributeError: below stage 3 there are none.
        """
        if self.runtime.stage != 3:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'parameter_offload': no stage 3")
        return self.__dict__.setdefault("_parameter_offload", ParameterOffload(self.runtime.model))


class _Handle:
    """Stands for all hooks of a model: removing it pauses them."""

    def __init__(self, owner: ParameterOffload) -> None:
        self._owner = owner

    def remove(self) -> None:
        self._owner.pause()


class _Coordinator:
    """dsx agrees on the order of gathers itself: there is no trace of a caller's to invalidate."""

    def is_invalid_trace(self) -> bool:
        return False

    def _invalidate_trace(self) -> None:
        """Nothing to do."""


class _Managed:
    """A model with the one method more that programs call on it; everything else is the model's."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def ds_external_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """None: a parameter that another module uses is gathered when it is used."""
        return ()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._module.named_parameters(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class ParameterOffload:
    """The hooks of one model at stage 3, as programs know them.

    Removing every handle of `forward_hooks` pauses gathering; `_register_deepspeed_module` resumes it. In between the
    caller holds the parameters with `zero.GatheredParameters`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = _Managed(module)
        self.param_coordinator = _Coordinator()
        self.forward_hooks: list[Any] = [_Handle(self)]
        self.backward_hooks: list[Any] = []
        self._model = module
        self._paused: ExitStack | None = None

    def pause(self) -> None:
        """Forwards neither gather nor free from now on."""
        if self._paused is None:
            self._paused = ExitStack()
            self._paused.enter_context(gather_hooks_paused(self._model))

    def _register_deepspeed_module(self, module: Any, count: Any = None) -> None:
        """Forwards gather and free again."""
        if self._paused is not None:
            self._paused.close()
            self._paused = None
        self.forward_hooks = [_Handle(self)]

    _register_hooks_recursively = _register_deepspeed_module


def renamed(engine: Engine) -> DeepSpeedEngine:
    """The same engine, and its optimizer, under DeepSpeed's classes."""
    named: type = PipelineEngine if isinstance(engine, DsxPipelineEngine) else DeepSpeedEngine
    engine.__class__ = named
    optimizer = engine._parts.optimizer
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.__class__ = DeepSpeedOptimizer
    return engine  # type: ignore[return-value]
