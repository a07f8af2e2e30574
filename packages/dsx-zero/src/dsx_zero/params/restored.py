"""Partitioned parameters become whole ones again: those that stay whole at stage 3, and all of them below stage 3.

The modules get an ordinary `nn.Parameter` instead. The partitioned object, which an optimizer or a list of
parameters may still hold, refers to the new one: reading, in-place writes and accessors work on the parameter that
is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..plan.leaves import marked_parameter
from .partitioned import PartitionedParameter
from .sources import SourceWithPlain

__all__ = ["WholeParameter", "current_parameter", "restore_model", "restore_parameter"]


class WholeParameter(SourceWithPlain):
    """The `ParameterSource` of an object whose parameter is whole now: everything is done on the parameter itself."""

    def __init__(self, name: str, plain: nn.Parameter) -> None:
        self.name, self._plain = name, plain

    @property
    def plain(self) -> nn.Parameter:
        """The parameter that is whole."""
        return self._plain

    def local_shard(self) -> torch.Tensor:
        return self.plain.detach().reshape(-1)

    def full_tensor(self) -> torch.Tensor:
        return self.plain.detach().clone()

    def write(self, edit: Callable[[torch.Tensor], object]) -> None:
        edit(self.plain)  # not a detached view: the version that counts edits is the parameter's

    def borrow(self) -> torch.Tensor | None:
        return self.plain

    def lend(self, output: Any) -> Any:
        return output

    def set_requires_grad(self, value: bool) -> str | None:
        self.plain.requires_grad_(value)
        return None


def restore_parameter(model: nn.Module, names: Sequence[str], face: PartitionedParameter) -> nn.Parameter:
    """Put a whole parameter with the values and attributes of `face` under each of `names` (collective)."""
    plain = nn.Parameter(face.full_tensor(), requires_grad=face.requires_grad)
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


def current_parameter(parameter: Any) -> Any:
    """The parameter that trains now, given an object that stood for it before it was made whole; anything else as it
    is.
    """
    if isinstance(parameter, PartitionedParameter) and isinstance(parameter.source, WholeParameter):
        return parameter.source.plain
    return parameter


def z3_leaf_parameter(param: torch.Tensor) -> bool:
    """Whether the parameter belongs to a marked module, or to a module inside one."""
    return marked_parameter(current_parameter(param))
