"""Replaces partitioned parameters by whole ones: those that stay whole at stage 3, and all of them below stage 3.

The modules get an ordinary `nn.Parameter` instead. The partitioned object, which an optimizer or a list of
parameters may still hold, refers to the new one: reads, in-place writes and accessors work on the parameter that is
trained. Where stage 3 replaces an ordinary parameter, accessors find the new one from the old one (`note_replaced`);
the old one keeps the values that it had.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..plan.leaves import marked_parameter
from .partitioned import PartitionedParameter
from .sources import SourceWithPlain

__all__ = ["WholeParameter", "current_parameter", "note_replaced", "restore_model", "restore_parameter"]


class WholeParameter(SourceWithPlain):
    """The `ParameterSource` of a partitioned object whose parameter is whole now: it works on the parameter itself."""

    def __init__(self, name: str, plain: nn.Parameter) -> None:
        self.name, self._plain = name, plain

    @property
    def plain(self) -> nn.Parameter:
        """The whole parameter."""
        return self._plain

    def local_shard(self) -> torch.Tensor:
        return self.plain.detach().reshape(-1)

    def full_tensor(self) -> torch.Tensor:
        return self.plain.detach().clone()

    def write(self, edit: Callable[[torch.Tensor], object]) -> None:
        edit(self.plain)  # not a detached view: edits are counted by the version of the parameter

    def borrow(self) -> torch.Tensor | None:
        return self.plain

    def watch_output(self, output: Any) -> Any:
        return output

    def set_requires_grad(self, value: bool) -> str | None:
        self.plain.requires_grad_(value)
        return None


def restore_parameter(model: nn.Module, names: Sequence[str], face: PartitionedParameter) -> nn.Parameter:
    """Replace `face` under each of `names` by a whole parameter with its values and attributes (collective)."""
    plain = nn.Parameter(face.source.full_tensor(), requires_grad=face.requires_grad)
    vars(plain).update({key: value for key, value in vars(face).items() if key not in ("_source", "_is_param")})
    for name in names:
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._parameters[attribute] = plain
    face._source = WholeParameter(face.source.name, plain)
    return plain


def restore_model(model: nn.Module) -> None:
    """Make every partitioned parameter of a model whole, one at a time (collective)."""
    names: dict[int, list[str]] = {}
    faces: dict[int, PartitionedParameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, PartitionedParameter):
            names.setdefault(id(parameter), []).append(name)
            faces[id(parameter)] = parameter
    for key, face in faces.items():
        restore_parameter(model, names[key], face)


_REPLACED: dict[int, tuple[weakref.ref, weakref.ref]] = {}
"""The parameter of stage 3 that took the place of an ordinary one, by the `id` of that. Keeps neither alive."""


def note_replaced(original: torch.Tensor, face: torch.Tensor) -> None:
    """`face` has taken the place of `original` in its module."""
    key = id(original)
    _REPLACED[key] = weakref.ref(original, lambda _: _REPLACED.pop(key, None)), weakref.ref(face)


def current_parameter(parameter: Any) -> Any:
    """The parameter that took the place of this one and is trained now; any other object unchanged."""
    while (known := _REPLACED.get(id(parameter))) is not None and known[0]() is parameter:
        if (face := known[1]()) is None:
            break
        parameter = face
    if isinstance(parameter, PartitionedParameter) and isinstance(parameter.source, WholeParameter):
        return parameter.source.plain
    return parameter


def z3_leaf_parameter(param: torch.Tensor) -> bool:
    """Whether the parameter belongs to a marked module, or to a module inside one."""
    return marked_parameter(current_parameter(param))
