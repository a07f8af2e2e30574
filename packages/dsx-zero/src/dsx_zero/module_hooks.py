"""Installs our hooks on the user's modules.

They stay outside of compiled graphs: a compiled module traces its hooks, and ours communicate with other ranks and use
autograd. A copy of a sharded module (`copy.deepcopy`, `pickle`, `torch.save`) is an ordinary module: there the hook is
replaced by one that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CallingHook", "ModuleHook"]


class ModuleHook:
    """Base of hooks on modules. What a hook does is its class's `__call__`, under `torch.compiler.disable`."""

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _do_nothing

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _hook_of_a_copy, ()


class CallingHook(ModuleHook):
    """A forward hook or a forward pre-hook that calls `function`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = torch.compiler.disable(function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def _hook_of_a_copy() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    """Takes the place of a hook in copies of its module."""
