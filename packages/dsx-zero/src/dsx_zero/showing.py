"""Hooks around forwards that put a tensor of another form into a module, made of what the module's parameters have.

A model may hold weights in a form that flat buffers cannot cut: DTensors (`from_dtensors`), and weights made of several
inner tensors (`from_codes`). dsx-zero shards plain tensors in their place, and while a forward runs the module shows
the weight as it was.

Left out: what is shown; the objects behind the hooks know it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from dsx_core.modules import ModuleHook, outside_graphs
from torch import nn

from .errors import ZeroStateError

__all__ = ["Shows", "ShowsHook", "lift_out_of", "show_in_forwards", "show_in_loads"]


class Shows(Protocol):
    """Shows tensors of one module, or of the modules in it."""

    what: str
    """The kind of the module's parameters, for the error of a pickle."""

    def show(self) -> None:
        """Put the tensors into the module: its forward begins."""
        ...

    def withdraw(self) -> None:
        """Undo the last `show`."""
        ...

    def to_load(self, values: dict[str, Any], prefix: str) -> None:
        """Put the values of the parameters into a state dict that has those of the tensors."""
        ...


class ShowsHook(ModuleHook):
    """Base of hooks that call a `Shows`. Copies of the module get hooks of their own."""

    lifted = False
    """Whether a compiled block around the module does what this hook does, before its graph runs (`lift_out_of`)."""

    def __init__(self, shows: Any) -> None:
        self._shows = shows

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = made = type(self)(copy.deepcopy(self._shows, memo))
        return made

    def __reduce__(self) -> Any:
        raise ZeroStateError(
            f"a module whose parameters are {self._shows.what} cannot be pickled: its copy would compute with these"
            " alone; save its state dict (torch's get_model_state_dict, or dsx_zero.full_state_dict)"
        )


class _BeforeForward(ShowsHook):
    def __init__(self, shows: Shows) -> None:
        super().__init__(shows)
        self._show = outside_graphs(shows.show)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.lifted and torch.compiler.is_compiling():
            return
        self._show()


class _AfterForward(ShowsHook):
    def __init__(self, shows: Shows) -> None:
        super().__init__(shows)
        self._withdraw = outside_graphs(shows.withdraw)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.lifted and torch.compiler.is_compiling():
            return
        self._withdraw()


class _ToLoad(ShowsHook):
    def __call__(self, module: nn.Module, values: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._shows.to_load(values, prefix)


def show_in_forwards(module: nn.Module, shows: Shows) -> Iterator[Any]:
    """Hook a module, so that its forward sees the tensors. Yields the handles that remove the hooks."""
    yield module.register_forward_pre_hook(_BeforeForward(shows))
    yield module.register_forward_hook(_AfterForward(shows), always_call=True)


def show_in_loads(module: nn.Module, shows: Shows) -> Any:
    """Hook a module, so that it loads state dicts with the tensors. Returns the handle that removes the hook."""
    return module.register_load_state_dict_pre_hook(_ToLoad(shows))


def lift_out_of(block: nn.Module) -> tuple[Shows, ...]:
    """Take what shows tensors to the modules in a block out of the graph that is compiled of the block's forward.

    Returns:
        What has to `show` before each forward of the block and to `withdraw` afterwards.
    """
    found: list[Shows] = []
    for module in block.modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()] if module is not block else []
        for hook in hooks:
            if isinstance(hook, (_BeforeForward, _AfterForward)):
                hook.lifted = True
                if isinstance(hook, _BeforeForward):
                    found.append(hook._shows)
    return tuple(found)
