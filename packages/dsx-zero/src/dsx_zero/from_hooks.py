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

from .errors import ZeroModelError
from .params.gather_hooks import GatherHooks, has_gather_hooks, shown_for, take_off
from .params.restored import note_replaced
from .plan.units import GATHER_HOOKS
from .showing import show_in_forwards, show_in_loads

__all__ = ["check_hooks", "gather_as", "values_of"]


@dataclass(eq=False)
class _Subclasses:
    """Shows the weights of a module and of those below it while its forward runs, where these are whole."""

    places: tuple[tuple[nn.Module, str, GatherHooks], ...]
    running: list[list[tuple[nn.Module, str, Any, torch.Tensor]]] = field(default_factory=list)

    what = "those of its weights, without the form in which these compute"

    def show(self) -> None:
        shown = []
        made: dict[int, torch.Tensor] = {}  # a tied weight is one
        for module, attribute, hooks in self.places:
            plain: Any = module._parameters.get(attribute)
            if type(plain) is not nn.Parameter:  # at stage 3 its unit puts the gathered weight there
                continue
            if id(plain) not in made:
                made[id(plain)] = shown_for(plain, lambda hooks=hooks, plain=plain: hooks.around(plain.detach()))
            shown.append((module, attribute, plain, made[id(plain)]))
            module._parameters[attribute] = made[id(plain)]  # type: ignore[assignment]
        self.running.append(shown)

    def withdraw(self) -> None:
        for module, attribute, plain, made in self.running.pop() if self.running else ():
            if module._parameters.get(attribute) is made:
                module._parameters[attribute] = plain

    def to_load(self, values: dict[str, Any], prefix: str) -> None:
        for _, attribute, _ in self.places:
            value = values.get(prefix + attribute)
            if has_gather_hooks(value):
                values[prefix + attribute] = take_off(value, prefix + attribute)[1]


def gather_as(parameter: torch.Tensor, like: torch.Tensor) -> None:
    """Gather a parameter at stage 3 in the form of a tensor subclass with FSDP2's hooks. Call it before `shard`.

    The parameter stays an ordinary one. While its unit is gathered, its modules have what the post-hook makes in its
    place; where it is whole on every rank, they have the parameter itself.

    Args:
        parameter: a parameter of a module.
        like: a tensor of the subclass with the parameter's shape and dtype. Its values are not used: it may be on the
            meta device.

    Raises:
        ZeroModelError: the subclass does not have both hooks, or not one tensor in it; another shape.
    """
    if like.shape != parameter.shape or not hasattr(like, "fsdp_pre_all_gather"):
        raise ZeroModelError(
            f"gather_as: got a {type(like).__name__} of shape {tuple(like.shape)} for a parameter of shape"
            f" {tuple(parameter.shape)}, expected a subclass with fsdp_pre_all_gather of the same shape"
        )
    vars(parameter)[GATHER_HOOKS] = take_off(like, "gather_as")[0]


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
        own: dict[nn.Module, list[tuple[nn.Module, str, GatherHooks]]] = {}
        for _, module, attribute, weight in places:
            own.setdefault(module, []).append((module, attribute, vars(made[id(weight)])[GATHER_HOOKS]))
        for module in model.modules() if places else ():
            below = [place for inner in module.modules() for place in own.get(inner, ())]
            if below:
                handles += show_in_forwards(module, _Subclasses(tuple(below)))
            if module in own:
                handles.append(show_in_loads(module, _Subclasses(tuple(own[module]))))
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
