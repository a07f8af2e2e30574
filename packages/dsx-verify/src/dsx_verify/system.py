"""The interface that an audit asks of a training system, and the parts that adapters share.

A `System` is a model that is trained somehow: wrapped, sharded, or driven by an engine. An audit asks it for whole
tensors under the names of the plain model, at three points of a step. Adapters for known systems are in `adapters.py`;
any other system needs a class with the calls below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

__all__ = ["POINTS", "Point", "System", "plain_name", "scaler_state", "whole"]

Point = Callable[[str], None]
POINTS = ("unclipped", "before", "after")

_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module")


@runtime_checkable
class System(Protocol):
    """The calls of an adapter. Calls that read tensors may be collective: every rank makes them at the same points.

    Two more are optional: `scaler_state()`, with what `GradScaler.state_dict` returns, and `states()`, this rank's part
    of the optimizer's states by name, which a checkpoint has to bring back.

    Attributes:
        module: the model whose forward computes (inside wrappers); its hooks fire once per micro-batch.
        clipped: whether `gradients()` at the point "before" has been clipped already.
        buffers_of_rank_0: whether each forward begins with rank 0's buffers, as under DDP.
    """

    module: nn.Module
    clipped: bool
    buffers_of_rank_0: bool

    def watch(self, point: Point) -> AbstractContextManager[None]:
        """While it is entered, call `point` in each update: "unclipped" when gradients are complete and not clipped
        (where the system tells), "before" right before the optimizer's update, "after" right after it.
        """
        ...

    def parameters(self) -> dict[str, torch.Tensor]:
        """The whole parameters, by the plain model's names; the master weights where there are any."""
        ...

    def gradients(self) -> dict[str, torch.Tensor]:
        """The whole, unscaled gradients of the coming update, by name; a name without a gradient is left out."""
        ...

    def buffers(self) -> dict[str, torch.Tensor]:
        """This rank's buffers, by name."""
        ...

    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        ...

    def loss_scale(self) -> float:
        """The factor on the loss; 1.0 without a scaler."""
        ...

    def save(self, folder: str) -> None:
        """Write a checkpoint. Raises NotImplementedError where the adapter knows no way."""
        ...

    def load(self, folder: str) -> None:
        """Read it back into this object."""
        ...


def scaler_state(system: System) -> dict[str, float]:
    """The loss scale, its rule and its counter, of an adapter that has `scaler_state()`; {}: there is none."""
    return dict(getattr(system, "scaler_state", dict)())


def plain_name(name: str, prefix: str = "") -> str:
    """The name in the plain model of a parameter or module of a wrapped one.

    Args:
        prefix: a first part that only the wrapper adds ("module" of DDP).
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if prefix and parts and parts[0] == prefix:
        parts = parts[1:]
    return ".".join(parts)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host of the whole tensor; a DTensor is gathered (collective)."""
    gather = getattr(tensor, "full_tensor", None)
    value = tensor if gather is None else gather()
    wait = getattr(value, "wait", None)
    return (value if wait is None else wait()).detach().to("cpu", copy=True)


def named(items: Iterable[tuple[str, Any]], prefix: str = "") -> dict[str, torch.Tensor]:
    """Whole tensors by plain names."""
    return {plain_name(name, prefix): whole(tensor) for name, tensor in items if tensor is not None}
