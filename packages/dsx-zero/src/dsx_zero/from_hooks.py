"""Takes over weights that FSDP2 sends in a form of their own, such as torchao's float8 weights.

    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    model, optimizer = dsx_zero.shard(model, make_optimizer, stage=3)

The ordinary tensor in such a weight becomes the parameter: it is divided, stepped and saved as any other. At stage 3
its gathers run FSDP2's hooks, so that 8 bits travel in the place of 16 (`params.hooked_unit`). Where the weight is
whole on every rank (stages 0-2, small weights), a forward sees the subclass around the parameter.

Left out: subclasses whose codes are trained; they are refused by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .params.gather_hooks import gather_hooks_of, has_gather_hooks, shown_for, take_off
from .params.restored import note_replaced
from .plan.units import GATHER_HOOKS
from .showing import show_in_forwards, show_in_loads

__all__ = ["check_hooks", "values_of"]


@dataclass(eq=False)
class _Subclasses:
    """Shows a module's own weights while its forward runs, where these are whole."""

    module: nn.Module
    attributes: tuple[str, ...]
    running: list[list[tuple[str, Any, torch.Tensor]]] = field(default_factory=list)

    what = "those of its weights, without the form in which these compute"

    def show(self) -> None:
        shown = []
        for attribute in self.attributes:
            plain: Any = self.module._parameters.get(attribute)
            hooks = gather_hooks_of(plain) if type(plain) is nn.Parameter else None
            if hooks is not None:  # at stage 3 its unit has put the gathered weight there
                made = shown_for(plain, lambda hooks=hooks, plain=plain: hooks.around(plain.detach()))
                shown.append((attribute, plain, made))
                self.module._parameters[attribute] = made  # type: ignore[assignment]
        self.running.append(shown)

    def withdraw(self) -> None:
        for attribute, plain, made in self.running.pop() if self.running else ():
            if self.module._parameters.get(attribute) is made:
                self.module._parameters[attribute] = plain

    def to_load(self, values: dict[str, Any], prefix: str) -> None:
        for attribute in self.attributes:
            value = values.get(prefix + attribute)
            if has_gather_hooks(value):
                values[prefix + attribute] = take_off(value, prefix + attribute)[1]


def check_hooks(model: nn.Module) -> None:
    """Refuse weights with FSDP2's hooks that cannot be taken over. Nothing is changed.

    Raises:
        ZeroModelError: there is no single tensor in such a weight, or it has only one of the hooks.
    """
    for path, module in model.named_modules():
        for attribute, weight in module._parameters.items():
            if has_gather_hooks(weight):
                take_off(weight, f"{path}.{attribute}" if path else attribute)


@contextmanager
def values_of(model: nn.Module) -> Iterator[None]:
    """Replace a model's weights with FSDP2's hooks (`check_hooks`) by the tensors in them. An error inside the context
    puts them back.
    """
    places = [
        (path, module, attribute, weight)
        for path, module in list(model.named_modules())
        for attribute, weight in module._parameters.items()
        if has_gather_hooks(weight)
    ]
    made: dict[int, nn.Parameter] = {}  # a tied weight is one
    handles: list[Any] = []
    try:
        for path, module, attribute, weight in places:
            if id(weight) not in made:
                made[id(weight)] = _parameter(weight, f"{path}.{attribute}" if path else attribute, module)
            module._parameters[attribute] = made[id(weight)]
        for module in dict.fromkeys(module for _, module, _, _ in places):
            attributes = tuple(a for _, m, a, _ in places if m is module)
            shown = _Subclasses(module, attributes)
            handles += [*show_in_forwards(module, shown), show_in_loads(module, shown)]
        yield
    except BaseException:
        for handle in handles:
            handle.remove()
        for _, module, attribute, weight in places:
            module._parameters[attribute] = weight
        raise


def _parameter(weight: Any, name: str, module: nn.Module) -> nn.Parameter:
    hooks, values = take_off(weight, name)
    hooks.module = weakref.ref(module)
    parameter = nn.Parameter(values, requires_grad=weight.requires_grad)
    own = {f"_{hooks.inner}", hooks.inner}
    marks = {k: v for k, v in vars(weight).items() if isinstance(v, (bool, int, str)) and k not in own}
    vars(parameter).update(marks, **{GATHER_HOOKS: hooks})
    note_replaced(weight, parameter)
    return parameter
