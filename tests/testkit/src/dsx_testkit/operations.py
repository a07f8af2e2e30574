"""What a block of code computes, counted by the rules of the flops profiler."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts operations of every operator that is dispatched inside the block; `flops` are they.

    Left out: kernels of optimizers, which are not dispatched, and what a message computes on its way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from dsx_monitor.flops.rules import rule_for  # lazy import: packages that are tested alone have none

        if types and any(cls.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for cls in types):
            return NotImplemented  # a wrapper answers itself; what it does inside comes here again
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # subclasses have had their word before
            result = func(*args, **kwargs)
        rule = rule_for(func)
        if rule is not None and not isinstance(rule, str) and not _in_a_message():
            self.flops += rule(args, kwargs, result)[0]
        return result


def _in_a_message() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("dsx_comm."):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
