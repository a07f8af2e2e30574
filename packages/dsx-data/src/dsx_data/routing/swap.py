"""Gives a layer a new behaviour in place: its class is replaced by a subclass of this class, and nothing else changes.

Parameters, names in state dicts, hooks and `isinstance` do not change, so a model may be converted before or after
it is sharded, and its checkpoints are those of the plain model. A wrapper module around the layer would rename every
parameter.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..errors import DataArgumentError

__all__ = ["Behaviour", "give_behaviour", "take_behaviour"]


class Behaviour(nn.Module):
    """Base of the classes that come before a layer's own class; their `forward` may call `super().forward`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so pickle and deepcopy cannot find it by name and must make it again.
        behaviours, kind = [], type(self)
        while issubclass(kind, Behaviour):
            behaviours.append(kind.__bases__[0])
            kind = kind.__bases__[1]
        return _rebuild, (tuple(behaviours), kind), self.__dict__


def give_behaviour(layer: nn.Module, behaviour: type[Behaviour], **state: Any) -> None:
    """Put `behaviour` before the class of `layer`, with `state` as its attributes.

    Raises:
        DataArgumentError: the layer has this behaviour already, or its `forward` was replaced on the object itself.
    """
    if "forward" in layer.__dict__:
        raise DataArgumentError(
            f"{type(layer).__name__}: its forward was replaced on the object, so a change of its class has no effect;"
            " convert the model before that"
        )
    if isinstance(layer, behaviour):
        raise DataArgumentError(f"{type(layer).__name__} has this behaviour already; convert a model once")
    layer.__class__ = _combined(behaviour, type(layer))
    layer.__dict__.update(state)


def take_behaviour(layer: nn.Module, behaviour: type[Behaviour], *names: str) -> None:
    """Give `layer` its own class back and remove its attributes `names`.

    Raises:
        DataArgumentError: `behaviour` is not the one that was given last.
    """
    kind = type(layer)
    if kind.__bases__[0] is not behaviour:
        raise DataArgumentError(f"{kind.__name__}: another behaviour was given later; remove that one first")
    layer.__class__ = kind.__bases__[1]
    for name in names:
        layer.__dict__.pop(name, None)


@functools.cache
def _combined(behaviour: type[Behaviour], kind: type[nn.Module]) -> type[nn.Module]:
    # The class keeps the name and module of the layer's own: configurations and hooks look layers up by them.
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (behaviour, kind), body)


def _rebuild(behaviours: tuple[type[Behaviour], ...], kind: type[nn.Module]) -> nn.Module:
    for behaviour in reversed(behaviours):
        kind = _combined(behaviour, kind)
    return kind.__new__(kind)
