"""A `TensorStore` in a dictionary that counts the bytes which were read from it and are still held by somebody. It has
a length, as `dsx_nvme.TensorStore` does: an empty one is false.
"""

from __future__ import annotations

import weakref

import torch

__all__ = ["MemoryStore"]


class _Done:
    """A ticket of what has happened already."""

    def wait(self) -> None:
        """Nothing is left to do."""

    def done(self) -> bool:
        """It has happened."""
        return True


class MemoryStore:
    """`held`: bytes read into tensors that are still alive; `peak`: the most there were."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.held = self.peak = 0

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def put(self, name: str, tensor: torch.Tensor) -> _Done:
        """Keep a copy."""
        self.tensors[name] = tensor.clone()
        return _Done()

    def get(self, name: str, out: torch.Tensor) -> _Done:
        """Fill `out`."""
        out.copy_(self.tensors[name])
        self.held += out.nbytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(out.untyped_storage(), self._gone, out.nbytes)
        return _Done()

    def delete(self, name: str) -> None:
        """Forget a tensor."""
        del self.tensors[name]

    def _gone(self, nbytes: int) -> None:
        self.held -= nbytes
