"""The compiled module. If it is missing, the PyTorch implementation is used, with the same results except for rounding;
there is one warning if much work takes that slow path.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from ._native_loader import NativeLoader

WARN_ABOVE = 1 << 32  # multiplications

_loader = NativeLoader("dsx_sparse_attn._C", abi=1)
module = _loader.module
missing = _loader.why_not
reference_only = _loader.reference_only


def threads() -> int:
    """The number of threads that a kernel may use: torch's setting."""
    return torch.get_num_threads()


def warn_slow(work: float) -> None:
    """Warn once per process if much work (multiplications) is done by PyTorch because there is no native code."""
    if work >= WARN_ABOVE and _loader.reason:
        _loader.warn_once(
            f"block-sparse attention runs over plain PyTorch, which is several times slower; {_loader.reason}"
            " [DSX654] docs: dsx explain DSX654"
        )


def native_status() -> dict[str, Any]:
    """A report on the native module that was built and what of it runs on this machine.

    Keys: `native` (bool), `reason` (why not, or ""), `isa` in use, `isas` that this CPU can run, `threads` (backend and
    count), `sanitizer`, `triton` (installed), `torch`.
    """
    found = module()
    status: dict[str, Any] = {
        "native": found is not None,
        "reason": missing(),
        "isa": found.isa() if found else None,
        "isas": list(found.isas()) if found else [],
        "threads": {"backend": found.threads_backend() if found else "torch", "count": threads()},
        "sanitizer": found.sanitizer() if found else "",
        "torch": torch.__version__,
    }
    status["triton"] = importlib.util.find_spec("triton") is not None
    return status
