"""The steps of a micro-batch on its way into the model: transforms, the cast of inputs, the forward's context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from .engine.inputs import CastInputs, InputChain, PassInputs
from .extension import Watch
from .precision import Precision

__all__ = ["input_chain"]


def input_chain(precision: Precision, model: nn.Module, watch: Watch) -> InputChain:
    """The transforms of the extensions, the cast at the end, and the context of the forward pass."""
    cast = CastInputs(precision.dtype("params")) if precision.cast_inputs else PassInputs()
    uncast = "" if _casts_inputs(precision) else precision.params
    return InputChain(watch.transforms, cast, uncast=uncast, autocast=_both(_autocast(precision, model), watch.forward))


def _casts_inputs(precision: Precision) -> bool:
    """Whether inputs of any floating dtype can be given to the model."""
    return precision.cast_inputs or precision.autocast or precision.params == "fp32"


def _autocast(precision: Precision, model: nn.Module) -> Callable[[], Any]:
    if not precision.autocast:
        return nullcontext
    kind = next((p.device.type for p in model.parameters()), "cpu")
    return lambda: torch.autocast(kind, dtype=precision.dtype("compute"))


def _both(autocast: Callable[[], Any], further: Callable[[], Any] | None) -> Callable[[], Any]:
    if further is None:
        return autocast

    def both() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(autocast())
        stack.enter_context(further())
        return stack

    return both
