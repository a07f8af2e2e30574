"""`ParameterSource`: gives a partitioned parameter its values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from .shard_view import ShardView

__all__ = ["ParameterSource", "SourceWithPlain"]


class ParameterSource(Protocol):
    """Gives a partitioned parameter its values. All methods but ``local_shard`` and ``borrow`` are collective."""

    @property
    def name(self) -> str:
        """The parameter's first name in the model, which errors use."""
        ...

    def local_shard(self) -> torch.Tensor:
        """This rank's elements, 1-D, in the parameter's dtype (empty if it has none)."""
        ...

    def full_tensor(self) -> torch.Tensor:
        """A new tensor with the whole parameter, the same on all ranks."""
        ...

    def shard_view(self) -> ShardView | None:
        """This rank's elements for torch's checkpoints, without communication; None before the model is sharded."""
        ...

    def write(self, edit: Callable[[torch.Tensor], object]) -> None:
        """Apply ``edit`` to the whole tensor on every rank. All ranks keep rank 0's result."""
        ...

    def borrow(self) -> torch.Tensor | None:
        """The plain parameter for an operation inside the running forward; None if no forward runs."""
        ...

    def read(self) -> torch.Tensor | None:
        """A copy of the values for operations while a model is built; None if they must not read. Collective."""
        ...

    def watch_output(self, output: Any) -> Any:
        """Return the result of an operation on a borrowed parameter, watched so that the values are gathered for its
        backward.
        """
        ...

    def set_requires_grad(self, value: bool) -> str | None:
        """Freeze the parameter or let it train. Returns the reason if that is not possible, else None."""
        ...

    def gradient(self) -> torch.Tensor | None:
        """The value of ``.grad``."""
        ...

    def set_gradient(self, value: torch.Tensor | None) -> bool:
        """Set or clear ``.grad``. Returns False if that is not possible."""
        ...

    def leaf(self) -> torch.Tensor | None:
        """The tensor that gets this rank's gradient in backward, for hooks; None before the model is sharded."""
        ...

    def converted(self, dtype: torch.dtype, device: torch.device) -> ParameterSource | None:
        """A source of the same values in another dtype or on another device, without communication; None if dtype and
        device cannot change any more.
        """
        ...


class SourceWithPlain(ABC):
    """Base of sources whose parameter also has a plain `nn.Parameter`, on which autograd works."""

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
        """None: ranks may do different things with a sharded model, so operations must not read."""
        return None

    def converted(self, dtype: torch.dtype, device: torch.device) -> ParameterSource | None:
        """None: the optimizer works with the present dtype and device."""
        return None
