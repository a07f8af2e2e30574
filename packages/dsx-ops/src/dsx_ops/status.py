"""The kernels that are built and those that run, on the CPU and on CUDA."""

from __future__ import annotations

from typing import Any

import torch

from . import native
from .cuda import loader


def missing_kernels(device: torch.device | str) -> str:
    """The reason why this package's operators run in plain PyTorch on a device; "" where compiled kernels serve it."""
    kind = torch.device(device).type
    if kind == "cpu":
        return native.why_not()
    return loader.reason() if kind == "cuda" else f"there are no kernels for {kind} tensors"


def native_status() -> dict[str, Any]:
    """The kernels that are built and those that run.

    Keys: `native` (bool), `reason` (why not, else ""), `isa` in use, `isas` this CPU can run, `threads` (backend and
    count), `sanitizer`, `cuda` (which implementation serves CUDA tensors), `torch`.
    """
    found = native.module()
    return {
        "native": found is not None,
        "reason": native.why_not(),
        "isa": found.isa() if found else None,
        "isas": list(found.isas()) if found else [],
        "threads": {"backend": found.threads_backend() if found else "torch", "count": native.threads()},
        "sanitizer": found.sanitizer() if found else "",
        "torch": torch.__version__,
        "cuda": loader.status(),
    }
