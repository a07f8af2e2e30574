"""Gathered blocks and batched products in plain PyTorch: any dtype, any device. See `reference.py`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from .. import native
from ..call import AttentionCall, Gradients
from ..reference import backward as _backward
from ..reference import forward as _forward

__all__ = ["backward", "forward", "refusals", "unavailable"]


def unavailable() -> str:
    """Returns "": it runs wherever torch runs."""
    return ""


def refusals(call: AttentionCall) -> list[str]:
    """Returns an empty list: it can do every call."""
    return []


def forward(call: AttentionCall):
    """See `reference.forward`."""
    if call.q.device.type == "cpu":
        native.warn_slow(call.work)
    with _no_autocast(call):
        return _forward(call)


def backward(call: AttentionCall, *rest) -> Gradients:
    """See `reference.backward`."""
    with _no_autocast(call):
        return _backward(call, *rest)


def _no_autocast(call: AttentionCall) -> AbstractContextManager[object]:
    """Switches autocast off. Under autocast the products of forward would have low precision, but not those of
    backward, which runs outside of it.
    """
    kind = call.q.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
