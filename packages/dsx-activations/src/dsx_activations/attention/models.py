"""Models whose attention runs over sequence shards without a change of their code.

    parallel = sequence_parallel(model, group)
    tokens, labels = (parallel.shard(t) for t in (tokens, labels))      # labels shifted before
    loss = token_mean(cross_entropy(model(tokens), labels, reduction="sum"), labels.numel(), group)

A Hugging Face model is told to call its attention through transformers' attention interface (`hugging_face.py`). In
other models every call of `F.scaled_dot_product_attention` and of `nn.MultiheadAttention` below a module of the model
is replaced, also while a module is recomputed in backward (`own_models.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import ActivationArgumentError, ActivationStateError
from . import hugging_face, own_models
from .cutting import ORDERS, place_in, sequence_segments
from .handle import SequenceParallel

__all__ = ["sequence_parallel"]

_MARK = "_sequence_parallel"
"""Attribute of a converted module. Copies of the module do not have what it stands for, so it is left out there."""


def sequence_parallel(
    model: nn.Module,
    group: Any = None,
    *,
    order: str = "plain",
    length: int | None = None,
    team: int | None = None,
    overlap: int = 1,
    kernel: str | Callable[..., torch.Tensor] = "auto",
    host_chunks: int | None = None,
) -> SequenceParallel:
    """Let the attention of a model run over a sequence that is cut over the ranks of a group.

    Every rank gives the model its part of each sequence, with `position_ids` of the whole sequence: Hugging Face models
    are given them. Parameters are not changed. Gradients are averaged over the group, as over data-parallel ranks;
    `token_mean` gives the loss that fits.

    Args:
        model: a Hugging Face model (or a module with one inside, such as peft's), or any module that calls
            `F.scaled_dot_product_attention` or `nn.MultiheadAttention` on tokens of one sequence.
        group: ranks that share the sequence; None: all ranks, or this process alone.
        order: "plain" or "zigzag"; how the tokens are cut.
        length: tokens of all sequences, if it never changes. None: the ranks ask each other once per forward, unless
            `describe` tells them; on a device the host waits for it.
        team, overlap, kernel, host_chunks: as for `sequence_attention`.

    Returns:
        A handle; `remove()` ends the conversion.

    Raises:
        ActivationArgumentError: an unknown order, or a Hugging Face model whose attention cannot be reached. Other
            models without attention are refused at the end of their first forward.
        ActivationStateError: the model is converted already.
    """
    if order not in ORDERS:
        raise ActivationArgumentError(f"sequence_parallel: order: got {order!r}, expected {' or '.join(ORDERS)}")
    if length is not None:
        size = place_in(group)[1]
        sequence_segments(length, size, 0, order)  # a sequence shorter than the group is refused here
    if any(isinstance(getattr(part, _MARK, None), SequenceParallel) for part in model.modules()):
        raise ActivationStateError(
            f"sequence_parallel: {type(model).__name__} is converted already; call remove() of what the first call gave"
        )
    options = {"team": team, "overlap": overlap, "kernel": kernel, "host_chunks": host_chunks}
    parallel = SequenceParallel(model, group, order, length, options)
    inner = hugging_face.model_in(model)
    if inner is not None:
        hugging_face.convert(inner, parallel)
    else:
        own_models.convert(model, parallel)
    converted = model if inner is None else inner
    object.__setattr__(converted, _MARK, parallel)
    parallel.call_at_the_end(partial(object.__delattr__, converted, _MARK))
    return parallel
