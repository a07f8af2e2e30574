"""The L2 norm of one buffer of gradients, summed in fp32 (in fp64 for fp64 gradients)."""

from __future__ import annotations

import torch

__all__ = ["block_norm"]


def block_norm(block: torch.Tensor) -> torch.Tensor:
    """The L2 norm of `block`: a 0-dim tensor on its device, fp32 (fp64 for a block of fp64)."""
    if block.dtype.itemsize < 4:
        return torch.linalg.vector_norm(block, dtype=torch.float32)
    return torch.linalg.vector_norm(block)
