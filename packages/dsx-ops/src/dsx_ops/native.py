"""Finds the compiled module, explains itself when it is missing, and says what runs.

Importing never fails and prints nothing: the module is looked for at the first use. Without it the PyTorch reference
serves, with the same results; a large update on that slow path warns once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

ABI = 6
WARN_ABOVE = 1 << 20
HINT = (
    "install a C++ compiler (g++ or clang++) and reinstall: pip install --no-cache-dir --force-reinstall dsx-ops "
    "(a wheel built without a compiler may be in pip's cache)"
)


class _Loader:
    """Holds the module, or the reason why there is none."""

    def __init__(self) -> None:
        self.looked = False
        self.module: Any = None
        self.reason = ""
        self.disabled = 0
        self.warned = False

    def load(self) -> Any:
        if not self.looked:
            self.looked = True
            self._look()
        return None if self.disabled else self.module

    def _look(self) -> None:
        if os.environ.get("DSX_OPS_NATIVE", "1") == "0":
            self.reason = "switched off by DSX_OPS_NATIVE=0"
            return
        try:
            module = importlib.import_module("dsx_ops._C")
        except ModuleNotFoundError:
            self.reason = f"the compiled module dsx_ops._C is not installed; {HINT}"
            return
        except ImportError as error:
            self.reason = f"the compiled module dsx_ops._C does not load ({error}); {HINT}"
            return
        if module.ABI != ABI:
            self.reason = f"dsx_ops._C has interface {module.ABI}, expected {ABI}: reinstall dsx-ops"
            return
        try:
            module.isa()
        except ValueError as error:  # DSX_ISA names what this CPU cannot run
            self.reason = f"DSX_ISA={os.environ.get('DSX_ISA')!r}: {error}"
            warnings.warn(f"dsx-ops runs without native code: {self.reason}", RuntimeWarning, stacklevel=2)
            return
        self.module = module


_loader = _Loader()


def module() -> Any:
    """The compiled module, or None."""
    return _loader.load()


def module_for(tensor: torch.Tensor, what: str, numel: int | None = None) -> Any:
    """The compiled module when `tensor` lies in host memory, else None; a large piece of work without it warns once."""
    if tensor.device.type != "cpu":
        return None
    found = module()
    if found is None:
        warn_slow(tensor.numel() if numel is None else numel, what)
    return found


def fp32_module_for(tensor: torch.Tensor, what: str) -> Any:
    """As `module_for`, for kernels that compute in fp32: None for float64, which is for checking gradients."""
    return None if tensor.dtype is torch.float64 else module_for(tensor, what)


def switched_off() -> bool:
    """Whether `reference_only()` holds right now."""
    return _loader.disabled > 0


def threads() -> int:
    """How many threads a kernel may use: torch's setting."""
    return torch.get_num_threads()


def warn_slow(numel: int, what: str) -> None:
    """One RuntimeWarning per process when a large piece of work goes over the PyTorch reference."""
    if numel < WARN_ABOVE or _loader.warned or _loader.disabled:
        return
    _loader.warned = True
    reason = _loader.reason or "no kernel for this combination of dtypes"
    warnings.warn(f"{what}: {numel} elements over the slow PyTorch path; {reason}", RuntimeWarning, stacklevel=3)


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Within this context the PyTorch reference serves even where native code is there (to compare the two)."""
    _loader.disabled += 1
    try:
        yield
    finally:
        _loader.disabled -= 1


def why_not() -> str:
    """Why there is no compiled module; "" when there is."""
    return "" if module() is not None else _loader.reason or "switched off by reference_only()"
