"""Finds the compiled CUDA module at its first use, and says what serves CUDA tensors.

The module is optional: it is built where there is nvcc (`DSX_BUILD_CUDA`). Whatever keeps it from running (not built,
driver too old, switched off) is a sentence in `reason()`, never an error: torch's kernels serve then.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from .. import native

ABI = 4
HINT = (
    "install the CUDA toolkit (nvcc) and reinstall: DSX_BUILD_CUDA=1 pip install --no-cache-dir --force-reinstall"
    " dsx-ops"
)
FALLBACK = "torch's fused Adam and SGD where all dtypes match, plain torch operations elsewhere"


class _Loader:
    """Holds the module, or the reason why there is none."""

    def __init__(self) -> None:
        self.looked = False
        self.module: Any = None
        self.reason = ""

    def load(self) -> Any:
        if not self.looked:
            self.looked = True
            self.reason = self._look()
        return None if native.switched_off() else self.module

    def _look(self) -> str:
        if os.environ.get("DSX_OPS_NATIVE", "1") == "0":
            return "switched off by DSX_OPS_NATIVE=0"
        try:
            module = importlib.import_module("dsx_ops._cuda")
        except ModuleNotFoundError:
            return f"the compiled module dsx_ops._cuda is not installed; {HINT}"
        except ImportError as error:
            return f"the compiled module dsx_ops._cuda does not load ({error}); {HINT}"
        if module.ABI != ABI:
            return f"dsx_ops._cuda has interface {module.ABI}, expected {ABI}: reinstall dsx-ops"
        if torch.version.cuda is None:
            return "dsx_ops._cuda is built, but this torch has no CUDA"
        try:
            module.check_driver()
        except RuntimeError as error:
            return f"dsx_ops._cuda cannot run: {error}"
        self.module = module
        return ""


_loader = _Loader()


def module() -> Any:
    """The compiled CUDA module, or None."""
    return _loader.load()


def reason() -> str:
    """Why there is no module; empty when there is."""
    if module() is not None:
        return ""
    return _loader.reason or "switched off by reference_only()"


def status() -> str:
    """One sentence on what serves CUDA tensors."""
    missing = reason()
    return f"{FALLBACK} (no CUDA kernels of dsx-ops: {missing})" if missing else "kernels of dsx-ops"
