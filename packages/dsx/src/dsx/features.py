"""The extensions of an engine, in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config.sections import installed
from .extension import Extension

__all__ = ["installed_extensions"]


def installed_extensions(keys: Mapping[str, Any]) -> list[Extension]:
    """New extensions of installed packages for the sections that a configuration has, by name of the section."""
    found = installed()
    return [found[name].load()() for name in sorted(found) if keys.get(name) is not None]
