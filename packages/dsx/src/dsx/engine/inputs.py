"""Transforms a batch before it reaches the model: a chain of transforms, the last of which casts floating tensors.

The chain is chosen once from the configuration. A transform returns the arguments for the next one, and does not change
the caller's objects. Only containers around a changed tensor are rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the model's forward."""


class BatchTransform(Protocol):
    """Changes a micro-batch before the model sees it."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments: ...


class InputChain:
    """The transforms in order, and the cast at the end.

    Args:
        transforms: the transforms.
        cast: applied to the positional arguments and to the keyword arguments.
    """

    def __init__(self, transforms: Sequence[BatchTransform], cast: Callable[[Any], Any]) -> None:
        self._transforms, self.cast = tuple(transforms), cast

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments for the model."""
        for transform in self._transforms:
            args, kwargs = transform(args, kwargs)
        return self.cast(args), self.cast(kwargs)


class PassInputs:
    """Leaves inputs unchanged."""

    def __call__(self, value: Any) -> Any:
        """Return `value` itself."""
        return value


class CastInputs:
    """Casts floating-point tensors in positional and keyword arguments to `dtype`; integers and masks are kept.

    Lists, tuples (also named ones) and mappings are searched; other objects are passed unchanged.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, value: Any) -> Any:
        """Return `value` with its floating tensors cast."""
        if isinstance(value, torch.Tensor):
            return value.to(self.dtype) if value.is_floating_point() else value
        if isinstance(value, Mapping):
            changed = {key: self(item) for key, item in value.items()}
            return changed if type(value) is dict else _rebuilt(value, changed)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self(item) for item in value))
        if isinstance(value, (list, tuple)):
            return type(value)(self(item) for item in value)
        return value


def _rebuilt(original: Mapping, changed: dict) -> Any:
    """A mapping of the original's kind (`BatchEncoding`, `OrderedDict`, ...) with new values."""
    try:
        return type(original)(changed)  # type: ignore[call-arg]
    except TypeError:
        return changed
