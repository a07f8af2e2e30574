"""Recomputes complete modules, without a change of the model's code.

A module's calls go through `checkpoint`, its hooks included, so that at ZeRO stage 3 the recomputation gathers the
module's parameters as the forward does. The call is stored in the attribute that `nn.Module.compile` uses: PyTorch
leaves it out of copies and pickles, so that these are ordinary modules. A module that is compiled stays compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from dsx_core.modules import CALL, AroundCall, CallingHook
from torch import nn

from .call import run_checkpoint
from .operators import keep_operators

_log = logging.getLogger("dsx_activations")

__all__ = ["recompute_modules", "recomputed_modules"]


class RecomputedCall(AroundCall):
    """Calls a module through `checkpoint`.

    Args:
        module: the module.
        call: what is called; None: the module's ordinary call.
        keeps_operators: keep the results of expensive operators (`operators.py`).
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any] | None, *, keeps_operators: bool = False) -> None:
        super().__init__(module, call)
        self._context_fn = keep_operators if keeps_operators else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.call(*args, **kwargs)
        return run_checkpoint(self.call, args, kwargs, context_fn=self._context_fn)


class BetweenGraphs(CallingHook):
    """A forward pre-hook of recomputed modules. If the model around them is compiled as a whole, PyTorch would trace
    the `forward` of the module's class and leave the recomputation out. So each of these modules ends the graph before
    it and runs as without compilation; a warning says so once.
    """

    def __init__(self) -> None:
        said: list[bool] = []

        def tell() -> None:
            if not said:
                said.append(True)
                _log.warning(
                    "the model is compiled as a whole, and some of its blocks are recomputed: they run between the"
                    " graphs, not compiled; compile the blocks instead (dsx_zero.compile_units, engine.compile)"
                )

        super().__init__(lambda *args: None)
        self._tell = torch.compiler.assume_constant_result(tell)  # runs while the compiler traces

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            self._tell()
            torch._dynamo.graph_break()


def recompute_modules(
    model: nn.Module, names: Iterable[str], *, keeping_operators: Collection[str] = ()
) -> Callable[[], None]:
    """Recompute these modules in every backward from now on. Calling it for a module again does nothing.

    Args:
        model: where the names begin.
        names: full names of modules, none inside another.
        keeping_operators: those of them whose matrix products and attention are kept (`operators.py`).

    Returns:
        A function that ends the recomputation of those modules.
    """
    made: list[RecomputedCall] = []
    handles: list[Any] = []
    hook = BetweenGraphs()
    for name in names:
        module = model.get_submodule(name)
        call = getattr(module, CALL, None)
        if isinstance(call, RecomputedCall):
            continue
        made.append(RecomputedCall(module, call, keeps_operators=name in keeping_operators))
        setattr(module, CALL, made[-1])
        handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def end() -> None:
        for handle in handles:
            handle.remove()
        for call in made:
            if getattr(call.module, CALL, None) is call:
                setattr(call.module, CALL, call.inner)

    return end


def recomputed_modules(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that are recomputed."""
    return tuple(n for n, m in model.named_modules() if isinstance(getattr(m, CALL, None), RecomputedCall))
