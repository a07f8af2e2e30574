"""`get_model_profile`: the figures of one call of a model, in one line of code."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .facts import unknown_text
from .profiler import FlopsProfiler, ProfilerError
from .units import flops_to_string, macs_to_string, params_to_string

__all__ = ["get_model_profile"]

logger = logging.getLogger("dsx_monitor")


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, multiply-accumulates and parameters of one forward pass (or of `generate`) in evaluation mode.

    Afterwards every module is in the mode it had before, and running statistics are unchanged. The printed profile
    names the operators that are not counted; if nothing is printed, a warning of the logger `dsx_monitor` names them.

    Args:
        input_shape: shape of a tensor of ones, which is passed to the model before `args`.
        args, kwargs: the arguments of the call.
        print_profile, detailed, module_depth, top_modules, output_file: as for `FlopsProfiler.print_model_profile`.
        warm_up: calls before the one that is measured.
        as_string: return texts with units instead of numbers.
        ignore_modules: classes whose calls are left out.
        mode: "forward" calls the model, "generate" calls its method `generate`.

    Returns:
        `(flops, macs, params)`.

    Raises:
        ProfilerError: there are no arguments to call the model with, or the mode is unknown.
    """
    if mode not in ("forward", "generate"):
        raise ProfilerError(f"get_model_profile(mode=...): got {mode!r}, expected 'forward' or 'generate'")
    positional, named = list(args), dict(kwargs or {})
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0, device="cpu"))
        positional.insert(0, torch.ones(tuple(input_shape), dtype=like.dtype, device=like.device))
    if not positional and not named:
        raise ProfilerError("get_model_profile: got nothing to call the model with; pass input_shape, args or kwargs")
    call: Any = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    with _evaluating(model):
        for _ in range(warm_up):
            call(*positional, **named)
        profiler.start_profile(ignore_modules)
        try:
            call(*positional, **named)
        finally:
            profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    elif profiler.totals.unknown:
        logger.warning("get_model_profile: not counted: %s", unknown_text(profiler.totals.unknown))
    flops, macs, params = profiler.root.flops, profiler.root.macs, profiler.root.params
    profiler.end_profile()
    if as_string:
        return flops_to_string(flops), macs_to_string(macs), params_to_string(params)
    return flops, macs, params


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the context the model is in evaluation mode; afterwards every module has its own former mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
