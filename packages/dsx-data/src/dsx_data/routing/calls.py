"""Access to a layer's arguments by name, whether a call passes them by position or by keyword."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..errors import DataArgumentError
from .swap import Behaviour

__all__ = ["LayerCall", "Signature"]


class Signature:
    """Names of the arguments of a layer's `forward`; the first one is the hidden states."""

    def __init__(self, layer: nn.Module) -> None:
        # The signature of the layer's own forward is needed: that of a `Behaviour` is (*args, **kwargs).
        own = next(k for k in type(layer).__mro__ if "forward" in vars(k) and not issubclass(k, Behaviour))
        self.names = [
            name
            for name, about in list(inspect.signature(vars(own)["forward"]).parameters.items())[1:]
            if about.kind in (about.POSITIONAL_ONLY, about.POSITIONAL_OR_KEYWORD)
        ]
        if not self.names:
            raise DataArgumentError(
                f"{type(layer).__name__}.forward has no named argument, expected the hidden states as its first"
            )

    def __deepcopy__(self, memo: Any) -> Signature:
        return self


class LayerCall:
    """One call of a layer, whose arguments can be replaced by name."""

    def __init__(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._names, self.args, self.kwargs = signature.names, list(args), dict(kwargs)

    @property
    def hidden(self) -> torch.Tensor:
        """The hidden states."""
        return self.args[0] if self.args else self.kwargs[self._names[0]]

    def get(self, name: str) -> Any:
        """The argument `name`; None if the call does not pass it."""
        if name in self.kwargs:
            return self.kwargs[name]
        place = self._names.index(name) if name in self._names else len(self.args)
        return self.args[place] if place < len(self.args) else None

    def set(self, name: str, value: Any) -> None:
        """Replace the argument `name`. If the call does not pass it, nothing changes."""
        if name in self.kwargs:
            self.kwargs[name] = value
        elif name in self._names and self._names.index(name) < len(self.args):
            self.args[self._names.index(name)] = value

    def set_hidden(self, value: torch.Tensor) -> None:
        """Replace the hidden states."""
        if self.args:
            self.args[0] = value
        else:
            self.kwargs[self._names[0]] = value
