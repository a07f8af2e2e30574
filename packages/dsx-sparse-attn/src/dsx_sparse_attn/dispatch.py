"""Chooses the implementation for a call: the backends, the order in which `auto` asks them, and their reasons to
refuse.

`flex` is not among the kernels that our operator calls: FlexAttention has its own autograd and is called instead of the
operator (see `backends/flex.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from .backends import flex, native_cpu, torch_blocks, triton_gpu
from .call import AttentionCall
from .errors import ArgumentError, BackendError

__all__ = ["BACKENDS", "ORDER", "Place", "backend_status", "kernels_for", "explain", "prefers_flex"]

_ALL: dict[str, ModuleType] = {"native": native_cpu, "triton": triton_gpu, "flex": flex, "torch": torch_blocks}
BACKENDS = ("auto", *_ALL)


class Place(NamedTuple):
    """A place in the order of `auto`: a backend, the calls for which it is there, and the reason."""

    backend: str
    why: str
    when: Callable[[AttentionCall], bool] = lambda _: True


def _no_bias_gradient(call: AttentionCall) -> bool:
    return call.bias is None or not call.bias.requires_grad


# `auto` takes the first backend in the device's order that is there for the call and does not refuse it.
ORDER: dict[str, tuple[Place, ...]] = {
    "cuda": (
        Place(
            "flex",
            "torch's tuned kernels for blocks of 128 and more; ours have not been timed on a GPU. Not for gradients of "
            "rpe, which it adds up in an order that changes from run to run",
            _no_bias_gradient,
        ),
        Place("triton", "smaller blocks, dropout, and gradients of rpe with the same bits in every run"),
        Place("flex", "what the Triton kernels refuse"),
        Place("torch", "everything else"),
    ),
    "cpu": (
        Place("native", "1.5 times as fast as FlexAttention compiled and more (bench/attention.py), and it trains"),
        Place("torch", "everything else"),
    ),
}  # fmt: skip
_ELSEWHERE = (Place("torch", "the only one for other devices"),)


def explain(call: AttentionCall) -> dict[str, list[str]]:
    """For every backend, why it refuses this call; an empty list means that it can do it."""
    return {name: backend.refusals(call) for name, backend in _ALL.items()}


def backend_status() -> dict[str, str]:
    """For every backend, why it cannot run on this machine; an empty string means that it can.

    For one call see `explain_backends`.
    """
    return {name: backend.unavailable() for name, backend in _ALL.items()}


def check_name(backend: str) -> None:
    """Raise `ArgumentError` if the name is not that of a backend."""
    if backend not in BACKENDS:
        raise ArgumentError(f"got backend={backend!r}, expected one of {', '.join(BACKENDS)}")


def first_choice(call: AttentionCall, *, flex_too: bool) -> str:
    """The backend that `auto` takes for a call. `flex_too`: FlexAttention may be chosen."""
    return next(
        place.backend
        for place in ORDER.get(call.q.device.type, _ELSEWHERE)
        if (flex_too or place.backend != "flex") and place.when(call) and not _ALL[place.backend].refusals(call)
    )


def kernels_for(call: AttentionCall, backend: str) -> ModuleType:
    """The module whose kernels do this call inside our operator.

    Raises `BackendError` if the requested backend refuses.
    """
    if backend == "auto":
        return _ALL[first_choice(call, flex_too=False)]
    _check_accepts(call, backend)
    return _ALL[backend]


def prefers_flex(call: AttentionCall, backend: str) -> bool:
    """Whether FlexAttention does this call: it was requested, or it is the first choice of `auto`.

    Raises:
        BackendError: it was requested and refuses.
    """
    if backend == "flex":
        _check_accepts(call, backend)
        return True
    if backend != "auto":
        return False
    if torch.compiler.is_compiling():  # ask only FlexAttention: questions about the device cannot be traced
        first = ORDER.get(call.q.device.type, _ELSEWHERE)[0]
        return first.backend == "flex" and first.when(call) and not flex.refusals(call)
    return first_choice(call, flex_too=True) == "flex"


def _check_accepts(call: AttentionCall, backend: str) -> None:
    if _ALL[backend].refusals(call):
        raise BackendError(backend, call.describe(), explain(call))
