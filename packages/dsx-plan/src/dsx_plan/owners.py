"""Finds on the stack who asks for memory: buffers of gradients, of gathered parameters and of messages are made in
files of their own.
"""

from __future__ import annotations

import sys

__all__ = ["who_asked"]

_OWNERS: tuple[tuple[str, str | None], ...] = (
    ("dsx_zero.params.partitioned_unit", "gathered"),
    ("dsx_zero.grads", "gradients"),
    ("dsx_zero.step.states", "states"),
    ("dsx_zero.step", "workspace"),
    ("dsx_zero.gather", "messages"),
    ("dsx_zero.transports", "messages"),
    ("dsx_activations", "activations"),
    ("dsx_zero.params", "parameters"),
    ("dsx_comm.lanes", None),
    ("dsx_comm", "messages"),
    ("dsx_ops.optim", "states"),
    ("dsx_pipe.runtime.messages", "activations"),
)
_ALLOCATOR_MODULES = ("dsx_zero.homes", "dsx_zero.params.memory")
"""Modules that allocate memory on behalf of their callers: the caller decides the class of that memory."""


def who_asked() -> tuple[str | None, bool]:
    """The class of what is being made by the file that asked for it, None for a model's or PyTorch's; and whether it
    is to lie in host memory.
    """
    frame, on_host = sys._getframe(2), False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "__torch_function__":
            pass  # a mode that hands the call on
        elif module.startswith(_ALLOCATOR_MODULES):
            on_host = on_host or (module == "dsx_zero.homes.home" and frame.f_code.co_name == "__init__")
            on_host = on_host or module == "dsx_zero.homes.stored"
        elif module == "dsx_activations.places" and frame.f_code.co_name == "host_memory":
            return "activations", True
        elif module.startswith(("dsx_zero.", "dsx_activations.", "dsx_comm.", "dsx_ops.", "dsx_pipe.runtime.messages")):
            if module == "dsx_zero.params.flat" and frame.f_code.co_name == "make_master":
                return "masters", on_host
            return next((kind for prefix, kind in _OWNERS if module.startswith(prefix)), None), on_host
        elif not module.startswith(("torch", "dsx_plan", "contextlib")):
            return None, on_host
        frame = frame.f_back
    return None, on_host
