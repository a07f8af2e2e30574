"""Sections whose models live in the sibling packages.

Each name is looked up once, when a configuration is loaded.
"""

from __future__ import annotations

import importlib
from typing import Any

from pydantic import ConfigDict

from .base import Section

__all__ = ["owned"]


class _Pending(Section):
    model_config = ConfigDict(frozen=True, strict=False, extra="allow")
    enabled: bool = False
    stage: int = 0


def owned(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return _Pending
