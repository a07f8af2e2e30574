"""Parameters that a module's forward uses although another module owns them."""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from ..errors import ZeroModelError
from ..params.partitioned import PartitionedParameter
from ..params.partitioned_unit import UnitParameter
from .registry import stage3_of

__all__ = ["register_external_parameter", "take_pending", "unit_index", "unregister_external_parameter"]

# Registered before the model is sharded: {module: {id of the parameter: parameter}}.
_PENDING: WeakKeyDictionary[nn.Module, WeakValueDictionary[int, torch.Tensor]] = WeakKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Gather ``parameter`` for every forward of ``module``, although another module owns it.

    Without this call, such a parameter is gathered when the forward reads it, and stays in memory until the outermost
    forward ends. With it, the parameter is gathered and freed with ``module``. On a sharded model the call takes effect
    at once, else when the model is sharded.

    Raises:
        ZeroModelError: ``parameter`` is not a parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise ZeroModelError(
            f"register_external_parameter: got {type(parameter).__name__}, expected a parameter of a module"
        )
    stage = stage3_of(module)
    if stage is None:
        _PENDING.setdefault(module, WeakValueDictionary())[id(parameter)] = parameter
        return
    unit = stage.unit_of(parameter)
    if unit is not None:
        stage.hooks.add(module, unit)


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Undo ``register_external_parameter``."""
    stage = stage3_of(module)
    if stage is None:
        _PENDING.get(module, {}).pop(id(parameter), None)
        return
    unit = stage.unit_of(parameter)
    if unit is not None:
        stage.hooks.drop(module, unit)


def take_pending(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Remove and return what was registered for modules of ``model``: pairs of a module and a parameter's ``id``."""
    found = []
    for module in model.modules():
        found += [(module, key) for key in _PENDING.pop(module, {})]
    return found


def unit_index(parameter: torch.Tensor) -> int | None:
    """Index of the unit that contains a partitioned parameter of a sharded model; None for any other parameter."""
    if isinstance(parameter, PartitionedParameter) and isinstance(parameter.source, UnitParameter):
        return parameter.source.unit.index
    return None
