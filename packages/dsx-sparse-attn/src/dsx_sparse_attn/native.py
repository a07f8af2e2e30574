"""Finds the compiled module, says why when it is missing, and reports what runs.

Importing never fails and prints nothing: the module is looked for at the first use. Without it the PyTorch
implementation serves, with the same results to rounding; much work on that slow path warns once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

ABI = 1
WARN_ABOVE = 1 << 32  # multiplications
HINT = (
    "install a C++ compiler (g++ or clang++) and reinstall: "
    "pip install --no-cache-dir --force-reinstall dsx-sparse-attn "
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
        if os.environ.get("DSX_SPARSE_ATTN_NATIVE", "1") == "0":
            self.reason = "switched off by DSX_SPARSE_ATTN_NATIVE=0"
            return
        try:
            module = importlib.import_module("dsx_sparse_attn._C")
        except ModuleNotFoundError:
            self.reason = f"the compiled module dsx_sparse_attn._C is not installed; {HINT}"
            return
        except ImportError as error:
            self.reason = f"the compiled module dsx_sparse_attn._C does not load ({error}); {HINT}"
            return
        if module.ABI != ABI:
            self.reason = f"dsx_sparse_attn._C has interface {module.ABI}, expected {ABI}: reinstall dsx-sparse-attn"
            return
        try:
            module.isa()
        except ValueError as error:  # DSX_ISA names what this CPU cannot run
            self.reason = f"DSX_ISA={os.environ.get('DSX_ISA')!r}: {error}"
            warnings.warn(f"dsx-sparse-attn runs without native code: {self.reason}", RuntimeWarning, stacklevel=2)
            return
        self.module = module


_loader = _Loader()


def module() -> Any:
    """The compiled module, or None."""
    return _loader.load()


def missing() -> str:
    """Why there is no module; empty when there is one."""
    return "" if module() is not None else _loader.reason or "switched off by reference_only()"


def threads() -> int:
    """How many threads a kernel may use: torch's setting."""
    return torch.get_num_threads()


def warn_slow(work: float) -> None:
    """Warn once per process when much work (multiplications) goes over PyTorch for lack of native code."""
    if work < WARN_ABOVE or _loader.warned or _loader.disabled or not _loader.reason:
        return
    _loader.warned = True
    warnings.warn(
        f"block-sparse attention runs over plain PyTorch, which is several times slower; {_loader.reason}",
        RuntimeWarning,
        stacklevel=3,
    )


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Within this context the PyTorch reference serves even where native code is there (to compare the two)."""
    _loader.disabled += 1
    try:
        yield
    finally:
        _loader.disabled -= 1


def native_status() -> dict[str, Any]:
    """What is built and what runs.

    Keys: `native` (bool), `reason` (why not, else ""), `isa` in use, `isas` this CPU can run, `threads` (backend and
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
