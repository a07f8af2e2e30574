"""Which implementation does a call: the table of backends, the choice, and the reasons against each.

`auto` takes the first of the table that does not refuse. `flex` is not in the table of kernels: FlexAttention brings its own
autograd and is called around our operator (see `backends/flex.py`).
"""

from __future__ import annotations

from types import ModuleType

from .backends import flex, native_cpu, torch_blocks, triton_gpu
from .call import AttentionCall
from .errors import ArgumentError, BackendError

__all__ = ["BACKENDS", "backend_status", "chosen", "explain", "prefers_flex"]

_KERNELS: dict[str, ModuleType] = {"native": native_cpu, "triton": triton_gpu, "torch": torch_blocks}
_ALL: dict[str, ModuleType] = {"native": native_cpu, "triton": triton_gpu, "flex": flex, "torch": torch_blocks}
BACKENDS = ("auto", *_ALL)


def explain(call: AttentionCall) -> dict[str, list[str]]:
    """For every backend why it refuses this call; an empty list means it can do it."""
    return {name: backend.refusals(call) for name, backend in _ALL.items()}


def backend_status() -> dict[str, str]:
    """For every backend why it runs nothing on this machine; an empty string means that it runs. For one call see `explain_backends`."""
    return {name: backend.unavailable() for name, backend in _ALL.items()}


def check_name(backend: str) -> None:
    """Raise `ArgumentError` for a name that is no backend."""
    if backend not in BACKENDS:
        raise ArgumentError(f"got backend={backend!r}, expected one of {', '.join(BACKENDS)}")


def chosen(call: AttentionCall, backend: str) -> ModuleType:
    """The module that does this call. Raises `BackendError` when the one asked for refuses."""
    if backend == "auto":
        return next(module for module in _KERNELS.values() if not module.refusals(call))
    if _ALL[backend].refusals(call):
        raise BackendError(backend, call.describe(), explain(call))
    return _KERNELS[backend]


def prefers_flex(call: AttentionCall, backend: str) -> bool:
    """Whether FlexAttention does this call: when asked for, or on CUDA where our kernels refuse and it does not.

    Raises:
        BackendError: it was asked for and refuses.
    """
    if backend == "flex":
        if flex.refusals(call):
            raise BackendError(backend, call.describe(), explain(call))
        return True
    return (
        backend == "auto"
        and call.q.device.type == "cuda"
        and bool(triton_gpu.refusals(call))
        and not flex.refusals(call)
    )
