"""Was a part of a model compiled? Code that must stay outside of compiled code, or cannot look inside, asks this."""

from __future__ import annotations

from typing import Any

from torch import nn

from .blocks import SLOT, RecomputedCall

__all__ = ["CompiledCall", "is_compiled"]


class CompiledCall:
    """Base class of objects that replace a module's `forward` and run compiled code."""


def is_compiled(module: nn.Module) -> bool:
    """Was a part of a model compiled: by `compile_units`, `module.compile()` or `torch.compile(module)`?"""
    return any(
        isinstance(part.__dict__.get("forward"), CompiledCall)
        or hasattr(part, "_orig_mod")
        or _is_compiled_call(getattr(part, SLOT, None))
        for part in module.modules()
    )


def _is_compiled_call(call: Any) -> bool:
    return _is_compiled_call(call.inner) if isinstance(call, RecomputedCall) else call is not None
