"""Transforms a batch before it reaches the model: a chain of transforms, the last of which casts floating tensors.

The chain is chosen once from the configuration. A transform returns the arguments for the next one, and does not change
the caller's objects. Only containers around a changed tensor are rebuilt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from .errors import EngineError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the model's forward."""


class BatchTransform(Protocol):
    """Changes a micro-batch before the model sees it."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments: ...


_OF_DTYPES = re.compile(r"dtype|scalar type|same type|should be the same|BFloat16|Half", re.IGNORECASE)
"""Words of torch's errors about operands of different dtypes."""


class InputChain:
    """The transforms in order, and the cast at the end.

    Args:
        transforms: the transforms.
        cast: applied to the positional arguments and to the keyword arguments.
        uncast: "bf16" or "fp16" if the model has parameters of this dtype and nothing casts inputs to it; else "".
        autocast: makes the context in which the model runs.
    """

    def __init__(
        self, transforms: Sequence[BatchTransform], cast: Callable[[Any], Any], *, uncast: str = "",
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:  # fmt: skip
        self._transforms, self.cast, self._uncast, self.autocast = tuple(transforms), cast, uncast, autocast

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments for the model."""
        for transform in self._transforms:
            args, kwargs = transform(args, kwargs)
        return self.cast(args), self.cast(kwargs)

    @contextmanager
    def naming_the_cast(self, *given: Any) -> Iterator[None]:
        """Around a forward of the model on `given`: torch's error about dtypes that do not fit names the setting.

        Raises:
            EngineError: operands differ in dtype, and a floating-point input does not have that of the parameters.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:
            expected = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._uncast)
            others = sorted({str(t.dtype) for t in _floats(given) if t.dtype != expected})
            if expected is None or not others or not _OF_DTYPES.search(str(error)):
                raise
            raise EngineError(
                f"engine(...): got inputs of {', '.join(others)}, and the parameters of the model are {expected}"
                f" ({error}); cast the inputs, for example with x.to({expected}), or set {self._uncast}.auto_cast to"
                " true, which casts all floating-point inputs"
            ) from error


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


def _floats(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _floats(item)


def _rebuilt(original: Mapping, changed: dict) -> Any:
    """A mapping of the original's kind (`BatchEncoding`, `OrderedDict`, ...) with new values."""
    try:
        return type(original)(changed)  # type: ignore[call-arg]
    except TypeError:
        return changed
