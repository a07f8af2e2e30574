"""Values that are sent between stages: tensors inside tuples, lists, dicts, named tuples and dataclasses.

`flatten` divides a value into its structure (which is small, picklable and comparable), its tensors and its other
values; `unflatten` joins them again. `describe` describes a value in words, for errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import PipelineError

# A structure consists of nested tuples: ("tensor",), ("value",) or (container, details, (children...)).
Structure = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The properties of a tensor that its receiver must know before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor. Only floating-point and complex tensors have gradients."""
        differentiable = tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        return TensorSpec(tuple(tensor.shape), tensor.dtype, differentiable)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def flatten(value: Any) -> tuple[Structure, list[torch.Tensor], list[Any]]:
    """Divide a value into (structure, tensors, other values), each in order of appearance.

    Raises:
        PipelineError: the value has a dataclass with a field that its constructor does not take.
    """
    tensors: list[torch.Tensor] = []
    others: list[Any] = []
    return _visit(value, tensors, others), tensors, others


# The functions that call themselves are not nested in others: one that is refers to itself, and what it refers to, the
# tensors too, would be kept until Python looks for such cycles.


def _visit(item: Any, tensors: list[torch.Tensor], others: list[Any]) -> Structure:
    if isinstance(item, torch.Tensor):
        tensors.append(item)
        return ("tensor",)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return ("namedtuple", type(item), tuple(_visit(child, tensors, others) for child in item))
    if type(item) in (tuple, list):
        return (type(item).__name__, None, tuple(_visit(child, tensors, others) for child in item))
    if isinstance(item, dict) and not dataclasses.is_dataclass(item):
        children = tuple(_visit(child, tensors, others) for child in item.values())
        return ("dict", (type(item), tuple(item)), children)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        children = tuple((name, _visit(getattr(item, name), tensors, others)) for name in _fields(item))
        return ("dataclass", type(item), children)
    others.append(item)
    return ("value",)


def _fields(item: Any) -> list[str]:
    hidden = [f.name for f in dataclasses.fields(item) if not f.init]
    if hidden:
        raise PipelineError(
            f"{type(item).__name__} travels between stages, but its constructor does not take {hidden[0]!r}; "
            "make it an ordinary field, or send a dict"
        )
    return [f.name for f in dataclasses.fields(item)]


def unflatten(structure: Structure, tensors: list[torch.Tensor], others: list[Any]) -> Any:
    """Make a value from a structure, tensors and other values. It is the inverse of `flatten`."""
    return _joined(structure, iter(tensors), iter(others))


def _joined(part: Structure, tensors: Iterator[torch.Tensor], others: Iterator[Any]) -> Any:
    kind = part[0]
    if kind == "tensor":
        return next(tensors)
    if kind == "value":
        return next(others)
    if kind == "dataclass":
        return part[1](**{name: _joined(child, tensors, others) for name, child in part[2]})
    children = [_joined(child, tensors, others) for child in part[2]]
    if kind == "namedtuple":
        return part[1](*children)
    if kind == "dict":
        cls, keys = part[1]
        items = dict(zip(keys, children))
        return items if cls is dict else cls(items)
    return tuple(children) if kind == "tuple" else children


def describe(value: Any) -> str:
    """A value in words: "float32[4, 16]", "(float32[4, 16], None)", "{'x': int64[4]}"."""
    structure, tensors, others = flatten(value)
    named = [str(TensorSpec.of(t)) for t in tensors]
    return describe_parts(structure, named, [_short(v) for v in others])


def describe_parts(structure: Structure, tensors: list[str], others: list[str]) -> str:
    """`describe` for a structure and texts for its tensors and other values."""
    texts, values = iter(tensors), iter(others)

    def say(part: Structure) -> str:
        kind = part[0]
        if kind == "tensor":
            return next(texts)
        if kind == "value":
            return next(values, "a value")
        if kind == "dataclass":
            return f"{part[1].__name__}({', '.join(f'{n}={say(c)}' for n, c in part[2])})"
        children = [say(child) for child in part[2]]
        if kind == "dict":
            return "{" + ", ".join(f"{k!r}: {c}" for k, c in zip(part[1][1], children)) + "}"
        return f"[{', '.join(children)}]" if kind == "list" else f"({', '.join(children)})"

    return say(structure)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"


def join_outputs(outputs: list[Any]) -> Any:
    """The outputs of all micro-batches: one tensor if they are tensors that can be concatenated, else a list."""
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    fits = (
        len(tensors) == len(outputs)
        and len({(t.shape[1:], t.dim() > 0) for t in tensors}) == 1
        and tensors[0].dim() > 0
    )
    return torch.cat(tensors) if fits else outputs
