"""Finds the compiled CUDA module at its first use, and says what serves CUDA tensors.

The module is optional: it is built where there is nvcc (`DSX_BUILD_CUDA`). Whatever keeps it from running (not built,
driver too old, switched off) is a sentence in `reason()`, never an error: torch's kernels serve then.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import native
from .._native_loader import NativeLoader

HINT = (
    "install the CUDA toolkit (nvcc) and reinstall: DSX_BUILD_CUDA=1 pip install --no-cache-dir --force-reinstall"
    " --no-deps --no-build-isolation ./packages/dsx-ops in the checkout of dsx"
)
FALLBACK = "torch's fused Adam and SGD where all dtypes match, plain torch operations elsewhere"


def _refuse(module: Any) -> str:
    if torch.version.cuda is None:
        return "dsx_ops._cuda is built, but this torch has no CUDA"
    try:
        module.check_driver()
    except RuntimeError as error:
        return f"dsx_ops._cuda cannot run: {error}"
    return ""


_loader = NativeLoader("dsx_ops._cuda", abi=4, refuse=_refuse, hint=HINT)


def module() -> Any:
    """The compiled CUDA module, or None."""
    return None if native.switched_off() else _loader.module()


def reason() -> str:
    """The reason why there is no module; empty when there is one."""
    return "switched off by reference_only()" if native.switched_off() else _loader.why_not()


def status() -> str:
    """One sentence on what serves CUDA tensors."""
    missing = reason()
    return f"{FALLBACK} (no CUDA kernels of dsx-ops: {missing})" if missing else "kernels of dsx-ops"
