"""Whole modules that are recomputed, without a change of the model's code.

A module's calls go through `checkpoint`, its hooks included, so that at ZeRO stage 3 the recomputation gathers the
module's parameters as the forward does. The place where this hangs is the one that `nn.Module.compile` uses: PyTorch
leaves it out of copies and pickles, which are ordinary modules. A module that is compiled stays compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .call import checkpoint

__all__ = ["SLOT", "recompute_modules", "recomputed_modules"]

SLOT = "_compiled_call_impl"
"""The attribute of a module that PyTorch calls in the place of its ordinary call, if it is there."""


class RecomputedCall:
    """Calls a module through `checkpoint`.

    Args:
        module: the module.
        call: what is called; None: the module's ordinary call.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any] | None) -> None:
        self.module, self.inner = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.module._call_impl if self.inner is None else self.inner
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return checkpoint(call, *args, **kwargs)


def recompute_modules(model: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """Recompute these modules in every backward from now on. Calling it for a module again does nothing.

    Args:
        model: where the names begin.
        names: full names of modules, none inside another.

    Returns:
        What ends it for those modules.
    """
    made: list[RecomputedCall] = []
    for name in names:
        module = model.get_submodule(name)
        call = getattr(module, SLOT, None)
        if isinstance(call, RecomputedCall):
            continue
        made.append(RecomputedCall(module, call))
        setattr(module, SLOT, made[-1])

    def end() -> None:
        for call in made:
            if getattr(call.module, SLOT, None) is call:
                setattr(call.module, SLOT, call.inner)

    return end


def recomputed_modules(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that are recomputed."""
    return tuple(n for n, m in model.named_modules() if isinstance(getattr(m, SLOT, None), RecomputedCall))
