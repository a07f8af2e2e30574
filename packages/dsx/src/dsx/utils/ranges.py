"""Named ranges in a profiler's timeline. Without CUDA they do nothing, at the cost of one test."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable)


def instrument_w_nvtx(function: _Function) -> _Function:
    """Decorator: each call is an NVTX range with the function's name, if CUDA is in use."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        if not torch.cuda.is_initialized():
            return function(*args, **kwargs)
        with torch.cuda.nvtx.range(function.__qualname__):
            return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]
