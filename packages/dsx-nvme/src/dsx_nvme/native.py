"""Finds the compiled module, explains itself when it is missing, and says what the kernel allows.

Importing never fails and prints nothing: the module is looked for at the first use. Without it a thread pool in Python
serves the whole API through the page cache.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from typing import Any

ABI = 2
ENGINES = ("io_uring", "libaio", "threads")
HINT = (
    "install a C++ compiler (g++ or clang++) and reinstall: pip install --no-cache-dir --force-reinstall dsx-nvme "
    "(a wheel built without a compiler may be in pip's cache)"
)


class _Loader:
    """Holds the module, or the reason why there is none, and what each engine answered."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.looked = False
        self.module: Any = None
        self.reason = ""
        self.refusals: dict[str, str] = {}

    def load(self) -> Any:
        if not self.looked:
            with self.lock:
                if not self.looked:
                    self.module, self.reason = _find()
                    self.looked = True
        return self.module

    def refusal(self, engine: str) -> str:
        """Why an engine cannot run here; empty when it can. Asked of the kernel once."""
        module = self.load()
        if module is None:
            return self.reason
        if engine not in self.refusals:
            self.refusals[engine] = module.probe(engine)
        return self.refusals[engine]


def _find() -> tuple[Any, str]:
    if not sys.platform.startswith("linux"):
        return None, f"native engines are for Linux; this is {sys.platform}"
    if os.environ.get("DSX_NVME_NATIVE", "1") == "0":
        return None, "switched off by DSX_NVME_NATIVE=0"
    try:
        module = importlib.import_module("dsx_nvme._C")
    except ModuleNotFoundError:
        return None, f"the compiled module dsx_nvme._C is not installed; {HINT}"
    except ImportError as error:
        return None, f"the compiled module dsx_nvme._C does not load ({error}); {HINT}"
    if module.ABI != ABI:
        return None, f"dsx_nvme._C has interface {module.ABI}, expected {ABI}: reinstall dsx-nvme"
    return module, ""


_loader = _Loader()


def module() -> Any:
    """The compiled module, or None."""
    return _loader.load()


def reason() -> str:
    """Why there is no compiled module; empty when there is one."""
    _loader.load()
    return _loader.reason


def refusal(engine: str) -> str:
    """Why `engine` cannot run on this machine; empty when it can."""
    return _loader.refusal(engine)


def native_status() -> dict[str, Any]:
    """What is built and what runs.

    Keys: `native` (bool), `reason` (why not, else ""), `engines` (name -> "" or why the kernel refuses it),
    `sanitizer`.
    """
    found = module()
    return {
        "native": found is not None,
        "reason": reason(),
        "engines": {name: refusal(name) for name in ENGINES},
        "sanitizer": found.sanitizer() if found else "",
    }
