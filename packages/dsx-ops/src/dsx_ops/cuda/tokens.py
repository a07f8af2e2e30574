"""Kernels of token gather and scatter for CUDA tensors. Indices are not looked at on the host; those outside of the
sequence touch nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import tokens
from ..tables import addresses
from . import launch


def _move(module: Any, gather: bool, full: Tensor, part: Tensor, indices: Tensor, batch_first: bool) -> None:
    batch, kept = indices.shape
    sizes = [batch, kept, full.shape[1 if batch_first else 0], full.shape[2] * full.element_size()]
    module.move_rows(launch.place(full), gather, addresses(full, part, indices), sizes, batch_first)


def run_token_gather(module: Any, x: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
    """`token_gather`."""
    out = tokens._fake_gather(x, indices, batch_first)
    _move(module, True, x, out, indices, batch_first)
    return out


def run_token_scatter(module: Any, full: Tensor, part: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
    """`token_scatter`."""
    tokens._check_scatter(full, part, indices, batch_first)
    out = full.clone()
    _move(module, False, out, part, indices, batch_first)
    return out


def run_token_scatter_(module: Any, full: Tensor, part: Tensor, indices: Tensor, batch_first: bool) -> bool:
    """`token_scatter_`."""
    tokens._check_scatter(full, part, indices, batch_first)
    _move(module, False, full, part, indices, batch_first)
    return True
