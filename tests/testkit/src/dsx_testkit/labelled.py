"""A device that ordinary PyTorch code can be told to use on a machine without one, with a count of its bytes.

It is the device "cpu:0". To PyTorch that is the CPU, so that everything works there; but `tensor.to("cpu:0")` copies as
a move to another device does, and whoever allocates names it. While the object is open it notes what is allocated with
that label, and counts the bytes as they come and go.

    with LabelledDevice() as device:
        model, optimizer = shard(model, make, device=device.label)
    assert device.peak < whole

Left out: what a tensor of the device gives birth to without the label (`tensor * 2`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["LabelledDevice"]


class LabelledDevice(TorchFunctionMode):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self.label = torch.device("cpu", 0)
        self.peak = 0
        """The largest `in_use` that was seen."""
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def in_use(self) -> int:
        """Bytes of what was allocated with the label and is alive; a storage that was resized counts as it is now."""
        alive = [storage for ref in self._storages.values() if (storage := ref()) is not None]
        return sum(storage.nbytes() for storage in alive)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        has_memory = type(result) in (torch.Tensor, torch.nn.Parameter)  # wrappers of tensors have none
        if has_memory and any(isinstance(v, torch.device) and v.index == 0 for v in given):
            storage = result.untyped_storage()
            self._storages[id(storage)] = weakref.ref(storage)
            self.peak = max(self.peak, self.in_use)
        return result
