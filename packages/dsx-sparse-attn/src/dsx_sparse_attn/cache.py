"""A cache of values made from a layout: its copy on a device, lists of tiles, block masks; and facts about a mask.

A layout is used in every layer and step, and the values that kernels need of it (moved, sorted) stay the same. The
cache refers to layouts weakly: values are freed with the layout tensor. If a layout was written to, its values are made
again; therefore the layout's version is kept with them.
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


_entries = WeakTensorKeyDictionary()  # layout tensor -> _Entry; global, but only a cache: it changes no result


def derived(layout: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """The value that `make` returns for this layout; it is made once per `key`.

    The value must not refer to the layout, which would then never be freed.
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
    """The layout on a device: the layout itself if it is there, otherwise a bool copy that is made once."""
    if layout.device == device:
        return layout
    if torch.compiler.is_compiling():
        return (layout != 0).to(device)
    return derived(layout, device, lambda: (layout != 0).to(device))


def _keeps_a_version(layout: Tensor) -> bool:
    """Whether a write to the layout can be seen. Inference tensors have no version, and a traced tensor has no values
    to cache.
    """
    return type(layout) in (Tensor, torch.nn.Parameter) and not layout.is_inference() and not layout.is_meta
