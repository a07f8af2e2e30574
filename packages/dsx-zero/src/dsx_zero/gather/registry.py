"""The models of this process that are sharded at stage 3, for functions that get only a module or a parameter.

Both sides of an entry are weak references, so an entry disappears with its model.
"""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["forget", "remember", "stage3_of"]

_STAGES: WeakKeyDictionary[nn.Module, weakref.ref[Any]] = WeakKeyDictionary()


def remember(model: nn.Module, stage: Any) -> None:
    """Note that ``model`` is sharded by ``stage``.

    The table does not keep ``stage`` alive: ``stage`` refers to the model, so the model would never be freed.
    """
    _STAGES[model] = weakref.ref(stage)


def forget(model: nn.Module) -> None:
    """End the stage 3 of ``model`` itself, if it has one. Its modules then have partitioned parameters and no hooks."""
    found = _STAGES.pop(model, None)
    stage = None if found is None else found()
    if stage is not None:
        stage.end()


def stage3_of(module: nn.Module) -> Any:
    """The `Stage3` that shards ``module`` or a model that contains it; None if there is none."""
    for model, stage in _STAGES.items():
        if any(child is module for child in model.modules()):
            return stage()
    return None
