"""`torch.compile` of a sharded model: block by block, with everything of dsx outside of the graphs.

A block's `forward` is compiled, not its call: hooks (gathering and freeing at stage 3, offload) and recomputation stay
around the graph, so that they neither break it nor are traced into it. Blocks of equal shape share one graph. At stage
3 a block's parameters exist only around its use, so no graph may reach over two of them. Tensors of another form that
modules in a block see (`showing`) are put there before the graph runs, and taken away behind it.

Copies of a module (`copy.deepcopy`, `pickle`) are ordinary modules, which run what the class says.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from dsx_core.modules import CompiledCall, block_names
from torch import nn

from .errors import ZeroModelError
from .gather.registry import stage3_of
from .showing import lift_out_of

__all__ = ["compile_units"]


class CompiledForward(CompiledCall):
    """Takes the place of a module's `forward`."""

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        functools.update_wrapper(self, module.forward)
        self._module = module
        self._shows = lift_out_of(module)
        self._function: Callable[..., Any] = torch.compile(module.forward, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._shows:
            return self._function(*args, **kwargs)
        with ExitStack() as shown:
            for shows in self._shows:
                shows.show()
                shown.callback(shows.withdraw)
            return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        copied = memo.get(id(self._module), self._module)
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module]]:
        return _ordinary_forward, (self._module,)


def _ordinary_forward(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


def compile_units(module: nn.Module, **options: Any) -> tuple[str, ...]:
    """Compile the blocks of a model in place: the units of stage 3, else the children of `nn.ModuleList`s and leaf
    modules; a model without blocks as a whole. Compiling again replaces what was compiled before.

    Args:
        module: what `shard` returned, or a model that is not sharded.
        options: arguments of `torch.compile` (`backend`, `mode`, `dynamic`, ...).

    Returns:
        Names of the modules that were compiled; the empty name is the model itself.

    Raises:
        ZeroModelError: `torch.compile` knows no such backend. Nothing was compiled then.
    """
    backend = options.get("backend")
    if isinstance(backend, str) and backend not in torch.compiler.list_backends(exclude_tags=()):
        raise ZeroModelError(
            f"compile_units(backend={backend!r}): torch.compile knows"
            f" {', '.join(torch.compiler.list_backends(exclude_tags=()))}; take one of them"
        )
    stage = stage3_of(module)
    names = [] if stage is None else [name for unit in stage.partitioned for name in unit.plan.users if name]
    # Blocks whose parameters all stay whole are no unit that is gathered; a block with units inside is not compiled.
    names += [b for b in block_names(module) if not any(name == b or name.startswith(f"{b}.") for name in names)]
    chosen = tuple(dict.fromkeys(names)) or ("",)
    for name in chosen:
        found = module.get_submodule(name)
        if isinstance(found.__dict__.get("forward"), CompiledForward):
            del found.forward
        found.forward = CompiledForward(found, options)  # type: ignore[method-assign]
    return chosen
