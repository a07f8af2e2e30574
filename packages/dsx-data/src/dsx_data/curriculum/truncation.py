"""Truncates sequences to a length, for a curriculum of sequence lengths.

The sequence length is the second dimension of the batch's token numbers (`input_ids`, else the first tensor of whole
numbers with two dimensions). Every tensor whose second dimension has this length is cut along it; square attention
masks are cut along their last two dimensions. Other values do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import DataArgumentError

__all__ = ["truncate_batch"]


def truncate_batch(
    args: tuple[Any, ...], kwargs: dict[str, Any], length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model with sequences of at most `length` tokens.

    Args:
        args, kwargs: the arguments of a call of the model. Every tensor whose second dimension is the sequence length
            is cut, also inside lists and mappings; all other values stay.
        length: greatest number of tokens per sequence.

    Returns:
        `args` and `kwargs` with cut tensors; the same objects if no sequence is longer than `length`.

    Raises:
        DataArgumentError: no tensor of token numbers is among the arguments.
    """
    tokens = kwargs.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
        tokens = next((t for t in _tensors((args, kwargs)) if t.dim() == 2 and not t.is_floating_point()), None)
    if tokens is None:
        raise DataArgumentError(
            "curriculum_learning (seqlen): got a batch without token numbers [batch, tokens], so its sequence length is"
            " not known; give the model's forward an argument curriculum_seqlen and cut there"
        )
    tokens_now = tokens.shape[1]
    if tokens_now <= length:
        return args, kwargs
    return _cut(args, tokens_now, length), _cut(kwargs, tokens_now, length)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _cut(value: Any, tokens_now: int, length: int) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dim() >= 3 and value.shape[-1] == value.shape[-2] == tokens_now:
            return value[..., :length, :length]
        if value.dim() == 4 and value.shape[-1] == tokens_now and value.shape[-2] == 1:
            return value[..., :length]
        return value[:, :length] if value.dim() >= 2 and value.shape[1] == tokens_now else value
    if isinstance(value, Mapping):
        changed = {key: _cut(item, tokens_now, length) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(changed)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(item, tokens_now, length) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(item, tokens_now, length) for item in value)
    return value
