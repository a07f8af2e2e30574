"""Values made from a layout, kept for as long as the layout lives: its copy on a device, lists of tiles, block masks.

A layout is used in every layer and step, while what kernels need of it (moved, sorted) stays the same. Values are kept
weakly: they go when the layout tensor goes. A layout that was written to since gets new values, which is why its
version is kept with them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["derived", "on_device"]

T = TypeVar("T")


class _Entry:
    def __init__(self, version: int) -> None:
        self.version = version
        self.values: dict[Hashable, Any] = {}


_entries = WeakTensorKeyDictionary()  # layout tensor -> _Entry; only a cache: what it holds changes no result


def derived(layout: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """The value that `make` gives for this layout, made once per `key`.

    It must not refer to the layout, which would then never be freed.
    """
    if not _keeps_a_version(layout):
        return make()
    entry = _entries.get(layout)
    if entry is None or entry.version != layout._version:
        entry = _Entry(layout._version)
        _entries[layout] = entry
    if key not in entry.values:
        entry.values[key] = make()
    return entry.values[key]


def on_device(layout: Tensor, device: torch.device) -> Tensor:
    """The layout on a device: itself, or a bool copy that is made once."""
    if layout.device == device:
        return layout
    if torch.compiler.is_compiling():
        return (layout != 0).to(device)
    return derived(layout, device, lambda: (layout != 0).to(device))


def _keeps_a_version(layout: Tensor) -> bool:
    """Whether a write to the layout can be noticed: inference tensors count no versions, and a traced tensor has no
    values to keep.
    """
    return type(layout) in (Tensor, torch.nn.Parameter) and not layout.is_inference() and not layout.is_meta
