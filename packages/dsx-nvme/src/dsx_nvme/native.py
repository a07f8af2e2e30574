"""The compiled module, and which of its engines the kernel allows. Without the module, a thread pool in Python does all
transfers through the page cache.
"""

from __future__ import annotations

import sys
from typing import Any

from ._native_loader import NativeLoader

ENGINES = ("io_uring", "libaio", "threads")


def _unfit() -> str:
    return "" if sys.platform.startswith("linux") else f"native engines are for Linux; this is {sys.platform}"


_loader = NativeLoader("dsx_nvme._C", abi=2, unfit=_unfit)
_refusals: dict[str, str] = {}  # the kernel's answer for each engine; each is asked once
module = _loader.module
reason = _loader.why_not


def refusal(engine: str) -> str:
    """The reason that `engine` cannot run on this machine; empty when it can."""
    found = module()
    if found is None:
        return reason()
    if engine not in _refusals:
        _refusals[engine] = found.probe(engine)
    return _refusals[engine]


def native_status() -> dict[str, Any]:
    """A report on the native module that was built and what of it runs on this machine.

    Keys: `native` (bool), `reason` (why not, or ""), `engines` (name -> "" or why the kernel refuses it),
    `sanitizer`.
    """
    found = module()
    return {
        "native": found is not None,
        "reason": reason(),
        "engines": {name: refusal(name) for name in ENGINES},
        "sanitizer": found.sanitizer() if found else "",
    }
