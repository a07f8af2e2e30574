"""Gathers the kept tokens of a sequence and scatters the results back.

The same is done for all other arguments of a layer that have one entry per token. `indices` [batch, kept] (int64) has
the kept positions of each sample, increasing. If dsx_ops is installed, each operation is one kernel of it; otherwise
plain torch computes the same.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from ..errors import DataArgumentError

__all__ = ["draw_indices", "gather_entries", "gather_mask", "gather_tokens", "scatter_tokens"]


def draw_indices(batch: int, tokens: int, kept: int, device: torch.device) -> Tensor:
    """Draw `kept` of `tokens` positions for each sample, without repetition: [batch, kept], int64, increasing.

    They are drawn from torch's generator of the device, as dropout's masks are: a recomputation that restores the
    generator's state draws the same positions.
    """
    return torch.rand(batch, tokens, device=device).topk(kept, dim=1, sorted=False).indices.sort(dim=1).values


def gather_tokens(x: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
    """The rows of x [batch, tokens, hidden] (or [tokens, batch, hidden]) at `indices`."""
    ops = _ops()
    if ops is not None:
        return ops.token_gather(x, indices, batch_first)
    places, axis = _places(x, indices, batch_first)
    return torch.gather(x, axis, places)


def scatter_tokens(full: Tensor, part: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
    """A copy of `full` with the rows at `indices` replaced by those of `part`."""
    ops = _ops()
    if ops is not None:
        return ops.tokens.token_scatter(full, part, indices, batch_first)
    places, axis = _places(full, indices, batch_first)
    return torch.scatter(full, axis, places, part)


def gather_entries(value: Any, indices: Tensor, tokens: int) -> Any:
    """The entries at `indices` of a tensor [1 or batch, tokens, ...], or of each tensor of a tuple or list.

    Values without one entry per token are returned unchanged.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(gather_entries(item, indices, tokens) for item in value)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != tokens:
        return value
    batch, kept = indices.shape
    wide = value.expand(batch, *value.shape[1:])
    places = indices.view(batch, kept, *(1 for _ in value.shape[2:])).expand(batch, kept, *value.shape[2:])
    return torch.gather(wide, 1, places)


def gather_mask(mask: Any, indices: Tensor, tokens: int) -> Any:
    """The attention mask of the kept tokens: its rows and columns at `indices`.

    Args:
        mask: None, [batch, tokens], or [1 or batch, 1 or heads, tokens or 1, tokens]; of any data type. A causal mask
            stays causal, because the positions increase.

    Raises:
        DataArgumentError: the mask has another shape, or is not a tensor.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 3, 4) or mask.shape[-1] != tokens:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise DataArgumentError(
            f"random-LTD: got an attention mask of {shape}, expected a tensor [batch, {tokens}] or [batch, heads,"
            f" {tokens}, {tokens}]; choose an attention implementation that takes one, for example"
            ' attn_implementation="sdpa"'
        )
    batch, kept = indices.shape
    if mask.dim() == 2:
        return torch.gather(mask.expand(batch, tokens), 1, indices)
    inner = mask.shape[1:-2]
    wide = mask.expand(batch, *mask.shape[1:])
    if mask.shape[-2] == tokens:
        rows = indices.view(batch, *(1 for _ in inner), kept, 1).expand(batch, *inner, kept, tokens)
        wide = torch.gather(wide, -2, rows)
    columns = indices.view(batch, *(1 for _ in inner), 1, kept).expand(*wide.shape[:-1], kept)
    return torch.gather(wide, -1, columns)


def _places(x: Tensor, indices: Tensor, batch_first: bool) -> tuple[Tensor, int]:
    places = indices if batch_first else indices.t()
    return places.unsqueeze(-1).expand(*places.shape, x.shape[-1]), 1 if batch_first else 0


@functools.lru_cache(maxsize=1)
def _ops() -> Any:
    """The package dsx_ops, or None if it is not installed: it is no dependency of this package."""
    if importlib.util.find_spec("dsx_ops") is None:
        return None
    import dsx_ops

    return dsx_ops
