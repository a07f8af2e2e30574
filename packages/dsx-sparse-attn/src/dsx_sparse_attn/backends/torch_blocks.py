"""Gathered blocks and batched products in plain PyTorch: any dtype, any device. See `reference.py`."""

from __future__ import annotations

from .. import native
from ..call import AttentionCall, Gradients
from ..reference import backward as _backward
from ..reference import forward as _forward

__all__ = ["backward", "forward", "refusals", "unavailable"]


def unavailable() -> str:
    """It runs wherever torch does."""
    return ""


def refusals(call: AttentionCall) -> list[str]:
    """It takes everything."""
    return []


def forward(call: AttentionCall):
    """See `reference.forward`."""
    if call.q.device.type == "cpu":
        native.warn_slow(call.work)
    return _forward(call)


def backward(call: AttentionCall, *rest) -> Gradients:
    """See `reference.backward`."""
    return _backward(call, *rest)
