"""Checkpoints without an engine: `dsx_checkpoint` under the name that scripts use.

The names of this module are the same objects as in the package, which are imported on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import dsx_checkpoint
from dsx_checkpoint import __all__ as __all__

from .deepspeed_names import PLACES, finder


def __getattr__(name: str) -> Any:
    if name in PLACES[__name__]:
        return finder(__name__)(name)
    try:
        return getattr(dsx_checkpoint, name)
    except AttributeError:
        if name.startswith("__") or importlib.util.find_spec(f"{dsx_checkpoint.__name__}.{name}") is None:
            raise
        # Else a module that nobody has imported yet would be loaded a second time, under this module's name.
        return importlib.import_module(f"{dsx_checkpoint.__name__}.{name}")
