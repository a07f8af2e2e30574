"""Finds the compiled module and explains itself when it is missing. Importing never fails and prints nothing."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

ABI = 3
HINT = (
    "install a C++ compiler (g++ or clang++) and reinstall: pip install --no-cache-dir --force-reinstall dsx-comm "
    "(a wheel built without a compiler may be in pip's cache)"
)


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
        return self.module

    def _look(self) -> str:
        if os.environ.get("DSX_COMM_NATIVE", "1") == "0":
            return "switched off by DSX_COMM_NATIVE=0"
        if not sys.platform.startswith("linux"):
            return f"the shared-memory transport needs Linux (memfd, futex), this is {sys.platform}"
        if sys.byteorder != "little":
            return "the shared-memory transport needs a little-endian machine"
        try:
            module = importlib.import_module("dsx_comm._C")
        except ModuleNotFoundError:
            return f"the compiled module dsx_comm._C is not installed; {HINT}"
        except ImportError as error:
            return f"the compiled module dsx_comm._C does not load ({error}); {HINT}"
        if module.ABI != ABI:
            return f"dsx_comm._C has interface {module.ABI}, expected {ABI}: reinstall dsx-comm"
        try:
            module.isa()
        except ValueError as error:  # DSX_ISA names what this CPU cannot run
            return str(error)
        self.module = module
        return ""


_loader = _Loader()


def module() -> Any:
    """The compiled module, or None."""
    return _loader.load()


def reason() -> str:
    """Why there is no compiled module; "" if there is one."""
    _loader.load()
    return _loader.reason


def native_status() -> dict[str, Any]:
    """What is built and what runs: `native` (bool), `reason` (why not), `isa` in use, `isas` this CPU can run."""
    found = module()
    return {
        "native": found is not None,
        "reason": _loader.reason,
        "isa": found.isa() if found else None,
        "isas": list(found.isas()) if found else [],
        "sanitizer": found.sanitizer() if found else "",
    }
