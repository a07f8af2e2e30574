"""`ParameterSource`: gives a partitioned parameter its values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["ParameterSource", "SourceWithPlain"]


class ParameterSource(Protocol):
    """Where a partitioned parameter's values are. All methods but ``local_shard`` and ``borrow`` are collective."""

    @property
    def name(self) -> str:
        """The parameter's first name in the model (what errors call it)."""
        ...

    def local_shard(self) -> torch.Tensor:
        """This rank's elements, 1-D, in the parameter's dtype (empty if it has none)."""
        ...

    def full_tensor(self) -> torch.Tensor:
        """A new tensor with the whole parameter, the same on all ranks."""
        ...

    def write(self, edit: Callable[[torch.Tensor], object]) -> None:
        """Apply ``edit`` to the whole tensor on every rank; rank 0's result is kept by all."""
        ...

    def borrow(self) -> torch.Tensor | None:
        """The plain parameter for an operation inside the running forward; None if no forward runs."""
        ...

    def read(self) -> torch.Tensor | None:
        """A copy of the values for code that builds the same model on all ranks; None where operations may not read
        (collective).
        """
        ...

    def lend(self, output: Any) -> Any:
        """The result of an operation on a borrowed parameter, watched so that its backward finds the values again."""
        ...

    def set_requires_grad(self, value: bool) -> str | None:
        """Freeze the parameter or let it train; the reason, if that cannot be."""
        ...

    def gradient(self) -> torch.Tensor | None:
        """What ``.grad`` is."""
        ...

    def set_gradient(self, value: torch.Tensor | None) -> bool:
        """Set or clear ``.grad``; False if that cannot be."""
        ...

    def leaf(self) -> torch.Tensor | None:
        """The tensor that backward gives this rank's gradient, to put hooks on; None before the model is sharded."""
        ...

    def converted(self, dtype: torch.dtype, device: torch.device) -> ParameterSource | None:
        """A source of the same values in another dtype or on another device (no communication); None where these are
        fixed.
        """
        ...


class SourceWithPlain(ABC):
    """What sources have in common whose parameter has a plain `nn.Parameter` too, which autograd works on."""

    @property
    @abstractmethod
    def plain(self) -> nn.Parameter:
        """The plain parameter."""

    def gradient(self) -> torch.Tensor | None:
        """See `ParameterSource.gradient`."""
        return self.plain.grad

    def set_gradient(self, value: torch.Tensor | None) -> bool:
        """See `ParameterSource.set_gradient`."""
        self.plain.grad = value
        return True

    def leaf(self) -> torch.Tensor | None:
        """See `ParameterSource.leaf`."""
        return self.plain

    def read(self) -> torch.Tensor | None:
        """Not there: ranks may do different things with a sharded model."""
        return None

    def converted(self, dtype: torch.dtype, device: torch.device) -> ParameterSource | None:
        """Not there: the optimizer works with the values as they are."""
        return None
