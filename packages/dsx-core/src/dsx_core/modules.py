"""Hooks and calls that dsx puts on a user's modules, and the choice of a model's blocks.

Several packages hook modules, replace their calls and look at their blocks, in any combination: sharding,
recomputation, compilation. Here is what they have to know of each other.

Hooks stay outside of compiled graphs: a compiled module traces its hooks, and ours communicate with other ranks and use
autograd. A copy of a module (`copy.deepcopy`, `pickle`, `torch.save`) is an ordinary module: there a hook is replaced
by one that does nothing, and a replaced call is left out.

The import loads no torch: whoever has modules has torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "CALL",
    "LEAF_MODULES",
    "AroundCall",
    "CallingHook",
    "CompiledCall",
    "ModuleHook",
    "block_names",
    "is_compiled",
    "outside_graphs",
    "runs_compiled",
]

CALL = "_compiled_call_impl"
"""If a module has this attribute, PyTorch calls it instead of the module's ordinary call, and leaves it out of copies
and pickles. `nn.Module.compile` uses it.
"""

LEAF_MODULES: WeakSet[nn.Module] = WeakSet()
"""Modules that their user has marked as one block, with everything inside. The marks are kept here and not on the
modules, so that copies have none.
"""


class ModuleHook:
    """Base of hooks on modules. What a hook does is its class's `__call__`, kept out of graphs by `outside_graphs`."""

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _do_nothing

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _hook_of_a_copy, ()


class CallingHook(ModuleHook):
    """A forward hook or a forward pre-hook that calls `function`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = outside_graphs(function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def _hook_of_a_copy() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    """Takes the place of a hook in copies of its module."""


class AroundCall:
    """Base of objects in `CALL` that do something around a module's call: they are no compiled code themselves.

    Args:
        module: the module.
        inner: what stood in `CALL` before; None: the module's ordinary call.
    """

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None) -> None:
        self.module, self.inner = module, inner

    @property
    def call(self) -> Callable[..., Any]:
        """The function that is called inside, with the module's hooks."""
        return self.module._call_impl if self.inner is None else self.inner

    def remove(self) -> None:
        """Put back what stood there. If another package has put its own around it since, nothing changes."""
        if getattr(self.module, CALL, None) is self:
            setattr(self.module, CALL, self.inner)


class CompiledCall:
    """Base of objects that replace a module's `forward` and run compiled code."""


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which `torch.compile` does not trace, nor what it calls: as `torch.compiler.disable(function)`.

    torch's own function imports the compiler, which takes 2 s at the start of each program, compiled or not. Here the
    marks are set that the compiler looks for: on the function, for code that is traced and calls it, and on its code,
    for frames that run while the compiler watches. A function is marked in place, so that a call costs nothing more; a
    bound method and other callables get a function around them. A torch without these (private) names gets its own
    function.
    """
    import torch  # lazy import: see the module's text

    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    names = ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
    if not all(hasattr(frames, name) for name in names):
        return torch.compiler.disable(function)
    outside: Any = function if isinstance(function, FunctionType) else _function_around(function)
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(outside.__code__, frames._FrameExecStrategy(skip, skip))
    outside._torchdynamo_disable = True
    outside._torchdynamo_disable_recursive = True
    return outside


def _function_around(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


def is_compiled(module: nn.Module) -> bool:
    """Was a part of a model compiled: by `dsx_zero.compile_units`, `module.compile()` or `torch.compile(module)`?"""
    return any(runs_compiled(part) for part in module.modules())


def runs_compiled(module: nn.Module) -> bool:
    """Is this module itself, without what is in it, called as compiled code?"""
    return (
        isinstance(module.__dict__.get("forward"), CompiledCall)
        or hasattr(module, "_orig_mod")
        or _is_compiled_call(getattr(module, CALL, None))
    )


def _is_compiled_call(call: Any) -> bool:
    return _is_compiled_call(call.inner) if isinstance(call, AroundCall) else call is not None


def block_names(model: nn.Module, leaves: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Names of leaf modules (`LEAF_MODULES`, and `leaves` by name) and of the children of the outermost
    `nn.ModuleList`s that hold parameters, in definition order.
    """
    from torch import nn  # lazy import: see the module's text

    found: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if child in LEAF_MODULES or path in leaves:
                found.extend([path] if next(child.parameters(), None) is not None else [])
            elif isinstance(child, nn.ModuleList):
                blocks = ((f"{path}.{index}", block) for index, block in child.named_children())
                found.extend(name for name, block in blocks if next(block.parameters(), None) is not None)
            else:
                visit(child, f"{path}.")

    visit(model, "")
    return tuple(found)
