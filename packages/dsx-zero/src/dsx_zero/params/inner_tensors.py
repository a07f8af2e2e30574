"""Takes tensors of several inner tensors apart, and makes them again: weights in 8 or 4 bits.

A quantised weight is a tensor subclass that holds codes, scales and other plain tensors. torch's protocol for that is
`__tensor_flatten__` and `__tensor_unflatten__` (torchao's int8, int4 and NF4 weights). Those of bitsandbytes hold them
as attributes of their own (`Params4bit` with a `QuantState`); this file knows which.

Left out: weights that are trained, bitsandbytes' `Int8Params` (refused), and what the codes mean.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from ..errors import ZeroModelError

__all__ = ["Form", "is_composed", "take_apart"]

Build = Callable[[dict[str, torch.Tensor], Any, Any, Any], torch.Tensor]
"""`__tensor_unflatten__`: the inner tensors by name, the context, and the size and strides of the result."""


@dataclass(frozen=True, eq=False)
class Form:
    """The way in which a tensor is made of its inner tensors.

    Attributes:
        kind: the name of its class.
        build: makes it.
        context: what it consists of besides tensors.
        size, stride: of the tensor.
        inner: for each inner tensor its name and its own form; for a plain one the order of its dimensions in memory.
    """

    kind: str
    build: Build
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    inner: tuple[tuple[str, Form | tuple[int, ...]], ...]

    def names(self, prefix: str) -> tuple[str, ...]:
        """The names of the plain tensors in it, such as `weight_qdata`, for the prefix `weight`."""
        found: list[str] = []
        for name, form in self.inner:
            found += form.names(f"{prefix}_{name}") if isinstance(form, Form) else [f"{prefix}_{name}"]
        return tuple(found)

    def made_of(self, values: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
        """The tensor over these plain tensors, by the names of `names(prefix)`. Nothing is copied."""
        found = {}
        for name, form in self.inner:
            key = f"{prefix}_{name}"
            if isinstance(form, Form):
                found[name] = form.made_of(values, key)
            else:
                found[name] = values[key].permute(sorted(range(len(form)), key=form.__getitem__))
        return self.build(found, self.context, self.size, self.stride)


def is_composed(tensor: Any) -> bool:
    """Whether it is a tensor of several inner tensors."""
    if not isinstance(tensor, torch.Tensor) or type(tensor) in (torch.Tensor, nn.Parameter):
        return False
    return hasattr(tensor, "__tensor_flatten__") or _of_bitsandbytes(tensor) is not None


def take_apart(tensor: torch.Tensor, prefix: str) -> tuple[Form, dict[str, torch.Tensor]]:
    """The form of a tensor, and the plain tensors in it by their names, with their dimensions in the order in which
    they lie in memory.

    Raises:
        ZeroModelError: a weight of bitsandbytes in 8 bits, or one that is not quantised yet.
    """
    found = _of_bitsandbytes(tensor)
    if found is None:
        subclass: Any = tensor
        names, context = subclass.__tensor_flatten__()
        tensors, build = {name: getattr(subclass, name) for name in names}, type(subclass).__tensor_unflatten__
    else:
        tensors, context, build = found(tensor, prefix)
    inner: list[tuple[str, Form | tuple[int, ...]]] = []
    plain: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if is_composed(value):
            form, below = take_apart(value, f"{prefix}_{name}")
            inner.append((name, form))
            plain.update(below)
        else:
            order = tuple(sorted(range(value.dim()), key=lambda dim: -value.stride(dim)))
            inner.append((name, order))
            plain[f"{prefix}_{name}"] = value.detach().permute(order)
    return Form(type(tensor).__name__, build, context, tensor.shape, tensor.stride(), tuple(inner)), plain


# bitsandbytes ---------------------------------------------------------------------------------------------------------


def _of_bitsandbytes(tensor: torch.Tensor) -> Callable[[Any, str], tuple[dict[str, torch.Tensor], Any, Build]] | None:
    """Nothing is imported for the question: a program that has such a weight has imported its module."""
    module = sys.modules.get("bitsandbytes")
    kinds = getattr(module, "nn", None)
    if kinds is None:
        return None
    if isinstance(tensor, kinds.Params4bit):
        return _parts_of_4_bits
    return _refuse_8_bits if isinstance(tensor, kinds.Int8Params) and not tensor.has_fp16_weights else None


def _parts_of_4_bits(weight: Any, name: str) -> tuple[dict[str, torch.Tensor], Any, Build]:
    state = weight.quant_state
    if state is None or getattr(state, "packing_format_for_cpu", False):
        raise ZeroModelError(
            f"{name}: is a Params4bit that {'is not quantised yet' if state is None else 'a forward has packed'};"
            " expected one with a quant_state as .to(device) makes it: move the model to its device before"
            " dsx_zero.shard, and train before you evaluate"
        )
    tensors = {"data": weight.data, "absmax": state.absmax}
    if state.nested:
        tensors |= {"nested_absmax": state.state2.absmax, "nested_offset": state.offset}
    return tensors, (type(weight), _without_tensors(state), dict(vars(weight), quant_state=None)), _with_4_bits


def _without_tensors(state: Any) -> Any:
    """A `QuantState` without the tensors that belong to one weight; it keeps the tables of codes."""
    found = copy.copy(state)
    found.absmax = None
    if found.nested:
        found.offset, found.state2 = None, copy.copy(state.state2)
        found.state2.absmax = None
    return found


def _with_4_bits(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> torch.Tensor:
    kind, empty, attributes = context
    state = copy.copy(empty)
    state.absmax = inner["absmax"]
    if state.nested:
        state.offset, state.state2 = inner["nested_offset"], copy.copy(empty.state2)
        state.state2.absmax = inner["nested_absmax"]
    made = kind(inner["data"], requires_grad=False)
    vars(made).update(attributes, quant_state=state)
    return made


def _refuse_8_bits(weight: Any, name: str) -> NoReturn:
    raise ZeroModelError(
        f"{name}: is an Int8Params of bitsandbytes, whose module keeps codes and scales of the last forward beside it,"
        " so that it would read memory that was freed; expected Linear4bit, or torchao's Int8WeightOnlyConfig"
    )
