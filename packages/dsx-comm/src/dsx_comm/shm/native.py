"""The compiled module of the shared-memory transport, and what it needs of the machine."""

from __future__ import annotations

import sys
from typing import Any

from .._native_loader import NativeLoader


def _unfit() -> str:
    if not sys.platform.startswith("linux"):
        return f"the shared-memory transport needs Linux (memfd, futex), this is {sys.platform}"
    if sys.byteorder != "little":
        return "the shared-memory transport needs a little-endian machine"
    return ""


_loader = NativeLoader("dsx_comm._C", abi=4, unfit=_unfit)
module = _loader.module
reason = _loader.why_not


def native_status() -> dict[str, Any]:
    """A report on the native module: `native` (bool), `reason` (why not), `isa` in use, `isas` this CPU can run."""
    found = module()
    return {
        "native": found is not None,
        "reason": reason(),
        "isa": found.isa() if found else None,
        "isas": list(found.isas()) if found else [],
        "sanitizer": found.sanitizer() if found else "",
    }
